"""Pickle torch's special modules by name.

cloudpickle serializes modules by name. But some modules of torch are instances of special classes,
which cloudpickle treats as data and cannot pickle. Without this, a training function that contains
`torch.backends.cudnn.benchmark = True` could not be serialized.
"""

from __future__ import annotations

import copyreg
import importlib
import sys
from collections.abc import Callable
from types import ModuleType


def pickle_modules_by_name() -> None:
    """Register every torch module of a special class to be pickled by name."""
    for name, module in sys.modules.copy().items():  # other threads may import
        if name.partition(".")[0] == "torch" and type(module) is not ModuleType:
            copyreg.pickle(type(module), _by_name)


def _by_name(module: ModuleType) -> tuple[Callable[[str], ModuleType], tuple[str]]:
    return importlib.import_module, (module.__name__,)
