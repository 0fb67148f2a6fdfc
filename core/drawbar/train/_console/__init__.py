"""Show the progress of a run in a terminal, notebook, or log file."""
