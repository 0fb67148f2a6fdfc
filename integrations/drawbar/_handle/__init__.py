"""Handle to a run: wait for it, stop it, inspect it, and read its result."""

import drawbar.train as _train  # noqa: F401  # first, because it imports this package
