"""Modules that the training function of a worker has imported, for the workers after it.

The controller passes them to the `WorkerFork` of the run, which `_fork_server` implements.
"""

from __future__ import annotations

import os
import sys
from typing import Protocol, Self

import msgspec

from drawbar._process.preloadable import select_preloadable

FORK_ERROR_VARIABLE = "DRAWBAR_FORK_SERVER_ERROR"
"""Why a worker was not forked. `client.py` of the fork server sets it."""

# Drawbar, Ray, and frameworks set these variables themselves. No import reads them.
_PREFIXES = (
    *("ACCELERATE_", "DRAWBAR_", "GLOO_", "KMP_", "MASTER_", "NCCL_", "RAY_", "TORCHELASTIC_"),
    *("TORCHINDUCTOR_", "TORCH_NCCL_"),
)
_NAMES = frozenset(
    {"CUBLAS_WORKSPACE_CONFIG", "CUDA_MODULE_LOADING", "PYTORCH_NVML_BASED_CUDA_CHECK"},
)


class ImportedModules:
    """Find the modules that later workers of a training function can get from a fork server.

    Create it before the function of the user is imported.
    """

    def __init__(self) -> None:
        self._first = select_preloadable(sys.modules.copy())
        self._settings = _read_settings()
        self._sys_path = tuple(os.path.abspath(path) for path in sys.path)

    def make_message(self) -> ModulesImported:
        """Return the message about the modules.

        A fork server imports modules before it knows the function. If the function has changed the
        environment or `sys.path`, its imports may depend on that, so only the modules that were
        imported before it are returned.
        """
        old, new = self._settings, _read_settings()
        changed = sorted(name for name in old.keys() | new.keys() if old.get(name) != new.get(name))
        names = self._first if changed else select_preloadable(sys.modules.copy())
        return ModulesImported(
            names=names,
            sys_path=self._sys_path,
            by_function=len(names) > len(self._first),
            changed_settings=tuple(changed),
        )


def _read_settings() -> dict[str, object]:
    """Return the settings that an import may depend on: variables, and the import path."""
    environment: dict[str, object] = {
        name: value
        for name, value in os.environ.items()
        if name not in _NAMES and not name.startswith(_PREFIXES)
    }
    return {**environment, "sys.path": list(sys.path)}


class ModulesImported(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Modules that rank 0 has imported and that a fork server can import for later workers.

    Attributes:
        names: Their names, in the order of the imports.
        sys_path: Import path of the worker.
        by_function: Whether the function has imported some of them.
        changed_settings: Variables that the function has changed, and "sys.path" if it has changed
            it. Then the modules are those that were imported before it.
    """

    names: tuple[str, ...]
    sys_path: tuple[str, ...]
    by_function: bool = False
    changed_settings: tuple[str, ...] = ()


class WorkerFork(Protocol):
    """Starts workers as forks of a process that has imported modules."""

    @property
    def modules(self) -> tuple[str, ...]:
        """Names of the modules."""
        ...

    @property
    def learned(self) -> ModulesImported | None:
        """Message of an earlier worker that has the modules, None if they are of another source."""
        ...

    @property
    def key(self) -> object:
        """Identifies the training function. None if the user has set the modules."""
        ...

    def learn(self, modules: ModulesImported) -> Self:
        """Return a fork with the modules that a worker has imported, and keep them for later."""
        ...

    def make_command(self) -> str:
        """Return the command that Ray starts in place of the interpreter of one worker."""
        ...
