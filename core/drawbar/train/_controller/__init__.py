"""Controller of a run: handle messages of workers, decide, and send commands."""
