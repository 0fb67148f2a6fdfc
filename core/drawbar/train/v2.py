"""Import paths of `ray.train.v2` as aliases of `drawbar.train`.

Ray Train exports the same objects under its plain paths too, and scripts use both.
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
"""Aliases below this path, each with the module in `drawbar.train` that has its objects."""


class _AliasModule(ModuleType):
    """Module that provides the objects of another module, which is imported on first use."""

    def __init__(self, name: str, target: str) -> None:
        super().__init__(name, f"`{target}`, under a path that it has in Ray Train.")
        self.__path__: list[str] = []
        self._target = target

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
