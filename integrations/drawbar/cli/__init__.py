"""The command `drawbar`: what trainers do, and the runs that they made, from a shell.

`python -m drawbar.cli` is the same.
"""

from drawbar.cli._app import main
from drawbar.train.backend import set_public_module

__all__ = ["main"]

set_public_module(globals())
