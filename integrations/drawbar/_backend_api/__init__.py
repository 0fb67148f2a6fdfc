"""Functions for integrations, which `drawbar.train.backend` exports."""

import drawbar.train as _train  # noqa: F401  # first, because it imports this package
