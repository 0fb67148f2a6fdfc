"""Find, inspect, verify, and clean up stored runs."""

import drawbar.train as _train  # noqa: F401  # first, because it imports this package
