"""The command `drawbar`: what trainers do, and the runs that they made, from a shell.

`python -m drawbar.cli` is the same.
"""

from drawbar.cli._app import main
from drawbar.train.backend import as_public

__all__ = ["main"]

as_public(globals())
