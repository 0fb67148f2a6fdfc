"""Check that `python -m NAME` finds a module before a run starts."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec

_NOT_FOUND = 3
_FIND_MODULE_SCRIPT = f"""
import runpy, sys

class NotFound(Exception):
    pass

try:
    runpy._get_module_details(sys.argv[1], NotFound)
except NotFound as error:
    print(error, file=sys.stderr)
    sys.exit({_NOT_FOUND})
"""


def require_module(name: str) -> None:
    """Check that `python -m name` finds a module from the current directory.

    Usually the module is in the directories of its packages. Otherwise the check runs Python in a
    subprocess, because a package may define its module search only when it is imported. Other
    errors of the subprocess are ignored: the run reports them better.

    Raises:
        ModuleNotFoundError: Python does not find the module.
    """
    if _has_module_file(name):
        return
    process = subprocess.run(
        [sys.executable, "-c", _FIND_MODULE_SCRIPT, name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if process.returncode == _NOT_FOUND:
        reason = process.stderr.strip().splitlines()[-1]
        raise ModuleNotFoundError(f"No module {name} in {os.getcwd()} or sys.path: {reason}")


def _has_module_file(name: str) -> bool:
    """Return whether a module or a package's `__main__` has a file. Imports no package."""
    top, *parts = name.split(".")
    if not all((top, *parts)):
        return False
    # find_spec also covers editable installs, zip files, and built-in modules.
    spec = PathFinder.find_spec(top, [os.getcwd(), *sys.path]) or find_spec(top)
    for part in parts:
        spec = _find_in_package(spec, part)
    if spec is not None and spec.submodule_search_locations is not None:
        spec = _find_in_package(spec, "__main__")
    return spec is not None and spec.submodule_search_locations is None


def _find_in_package(package: ModuleSpec | None, name: str) -> ModuleSpec | None:
    if package is None or package.submodule_search_locations is None:
        return None
    return PathFinder.find_spec(name, list(package.submodule_search_locations))
