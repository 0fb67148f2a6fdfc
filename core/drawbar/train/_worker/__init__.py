"""What lives in a worker's process: the actor, the function's thread, `report()` and the like."""
