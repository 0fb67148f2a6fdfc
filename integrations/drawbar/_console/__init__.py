"""Show the progress of a run in a terminal, notebook, or log file."""

import drawbar.train as _train  # noqa: F401  # first, because it imports this package
