"""Training functions that name `torch.backends.cudnn` and its like can be sent to the workers.

cloudpickle sends a function's modules along by name. But some modules of torch are objects of
classes of their own, which it takes for data and cannot pickle, so that a function with the line
`torch.backends.cudnn.benchmark = True` would be refused.
"""

from __future__ import annotations

import copyreg
import importlib
import sys
from collections.abc import Callable
from types import ModuleType


def pickle_modules_by_name() -> None:
    """Have every module of torch that is of a class of its own pickled by its name."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "torch" and type(module) is not ModuleType:
            copyreg.pickle(type(module), _by_name)


def _by_name(module: ModuleType) -> tuple[Callable[[str], ModuleType], tuple[str]]:
    return importlib.import_module, (module.__name__,)
