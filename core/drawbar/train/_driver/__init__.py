"""Driver side of a run: checks, run directory, datasets, and controller thread."""
