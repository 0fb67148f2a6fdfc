"""Command line interface of Drawbar: launch scripts, inspect and manage runs.

`python -m drawbar.cli` runs the same command.
"""

from drawbar.cli._app import main
from drawbar.train.backend import set_public_module

__all__ = ["main"]

set_public_module(globals())
