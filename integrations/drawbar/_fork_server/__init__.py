"""Workers that are forked from a server process that has imported their modules."""
