"""Ways to run other than with Ray actors and a driver: torchrun, programs, detached runs."""

import drawbar.train as _train  # noqa: F401  # first, because it imports this package
