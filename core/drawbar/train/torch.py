"""`drawbar.torch`, under the path that it has in Ray Train."""

from drawbar.torch import *

__path__: list[str] = []  # Python looks for aliases below this module; see _base/import_paths.py
