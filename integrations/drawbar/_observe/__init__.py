"""Goodput, times of ranks, resource samples, metrics for monitoring, and HTML cards."""

import drawbar.train as _train  # noqa: F401  # first, because it imports this package
