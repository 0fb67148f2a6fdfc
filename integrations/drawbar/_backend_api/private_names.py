"""Private names of other projects, which a later version may not have."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import sys
from typing import Any


def import_private(module: str, name: str) -> Any:
    """Import a private name of another project, which a later version may not have.

    Args:
        module: Module of the other project.
        name: Name in the module.

    Returns:
        The object. If it does not exist, an object that raises `RuntimeError` when it is used.

    Example:
        ```python
        check_error = import_private("lightgbm.basic", "_safe_call")
        ```
    """
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return _MissingPrivateName(module, name)


class _MissingPrivateName:
    """Replacement that raises an error when it is called, subclassed and created, or read."""

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def __call__(self, *args: object, **kwargs: object) -> Any:
        raise self._make_error()

    def __getattr__(self, attribute: str) -> Any:
        if attribute.startswith("__"):  # read by `copy`, `inspect`, and so on
            raise AttributeError(attribute)
        raise self._make_error()

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type]:
        return (type(self._name, (), {"__init__": self}),)

    def _make_error(self) -> RuntimeError:
        module = self._module.partition(".")[0]
        version = getattr(sys.modules.get(module), "__version__", "")
        return RuntimeError(
            f"Drawbar needs {self._module}.{self._name}, which {module} {version} does not have. "
            f"Install an earlier version of {module}, or upgrade Drawbar."
        )
