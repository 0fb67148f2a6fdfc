"""The paths of `ray.train.v2`, which hold the same objects as `drawbar.train` does.

Ray Train shows what these define under its plain paths too; scripts write both.
"""

import importlib
import sys
from types import ModuleType
from typing import Any

_INTEGRATIONS = ("jax", "lightgbm", "tensorflow", "torch", "xgboost")

ALIASES = {
    "api": "",
    "api.callback": "",
    "api.config": "",
    "api.context": "",
    "api.data_parallel_trainer": "",
    "api.exceptions": "",
    "api.preemption": "",
    "api.report_config": "",
    "api.reported_checkpoint": "",
    "api.result": "",
    "api.train_fn_utils": "",
    "api.validation_config": "",
    "torch.train_loop_utils": "torch",
    **{name: name for name in _INTEGRATIONS},
    "jax.config": "jax",
    "xgboost.config": "xgboost",
    **{f"{name}.{name}_trainer": name for name in _INTEGRATIONS},
}
"""What lies below this path, and where in `drawbar.train` its objects are."""


class _AliasModule(ModuleType):
    """A module that shows what another one has; that is imported by the first use."""

    def __init__(self, name: str, home: str) -> None:
        super().__init__(name, f"`{home}`, under a path that it has in Ray Train.")
        self.__path__: list[str] = []
        self._target = home

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(importlib.import_module(self._target), name)

    def __dir__(self) -> list[str]:
        return dir(importlib.import_module(self._target))


for _path in sorted(ALIASES):  # "api" before "api.config", which becomes an attribute of it
    _parent, _, _name = f"{__name__}.{_path}".rpartition(".")
    _module = _AliasModule(f"{_parent}.{_name}", f"drawbar.train.{ALIASES[_path]}".rstrip("."))
    sys.modules[_module.__name__] = _module
    setattr(sys.modules[_parent], _name, _module)
