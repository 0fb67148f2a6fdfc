"""Split datasets into shards that track their position."""

import drawbar.train as _train  # noqa: F401  # first, because it imports this package
