"""Write a checkpoint from memory in another process, and read it from there after a restart."""

import drawbar.train as _train  # noqa: F401  # first, because it imports this package
