"""Checks of `RunConfig.forkserver_preload`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from drawbar._fork_server.forkable import UNSAFE_MODULES

# Fields of a Ray runtime environment that choose another interpreter or a container.
_OTHER_INTERPRETERS = (
    *("pip", "uv", "conda", "container", "image_uri", "py_executable", "nsight", "_nsight"),
    *("rocprof_sys", "_rocprof_sys"),
)


VARIABLE = "DRAWBAR_FORKSERVER_PRELOAD"
"""Modules, with commas, for runs whose `forkserver_preload` is None."""


def check_preload(modules: Sequence[str] | None, runtime_env: Mapping[str, object] | None) -> None:
    """Check the modules to preload, and that they fit the runtime environment of the workers.

    Raises:
        ValueError: A module cannot be preloaded, or the workers have another interpreter.
    """
    _check_modules("forkserver_preload", modules or ())
    field = find_other_interpreter(runtime_env)
    if modules and field is not None:
        raise ValueError(
            f"forkserver_preload cannot be combined with worker_runtime_env[{field!r}], because "
            "workers then run in another environment. Remove one."
        )


def _check_modules(name: str, modules: Sequence[str]) -> None:
    for module in modules:
        if not all(part.isidentifier() for part in module.split(".")):
            raise ValueError(f"{name} must have names of modules, found {module!r}")
        if reason := UNSAFE_MODULES.get(module.split(".")[0]):
            raise ValueError(f"{name} must not have {module!r}, because {reason}. Remove it.")


def read_default_modules() -> tuple[str, ...] | None:
    """Return the modules of `DRAWBAR_FORKSERVER_PRELOAD`, None if it is not set."""
    value = os.environ.get(VARIABLE)
    if value is None:
        return None
    modules = tuple(name.strip() for name in value.split(",") if name.strip())
    _check_modules(VARIABLE, modules)
    return modules


def find_other_interpreter(runtime_env: Mapping[str, object] | None) -> str | None:
    """Return the field of a runtime environment that chooses the interpreter, None without one."""
    return next((name for name in _OTHER_INTERPRETERS if (runtime_env or {}).get(name)), None)
