"""Whether `python -m NAME` has something to run, told before anything is started for it."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec

_NOT_FOUND = 3
_ASK = f"""
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
    """Check that `python -m name` finds a module, from this folder.

    Usually it lies where the folders of its packages say. Where it does not, Python is asked, in a
    process of its own: a package may find its modules in ways of its own, which are known only when
    it is imported. What fails there in another way is left to the run, which tells it better.

    Raises:
        ModuleNotFoundError: It finds none; the message has Python's words.
    """
    if _has_module_file(name):
        return
    asked = subprocess.run(
        [sys.executable, "-c", _ASK, name],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
    )
    if asked.returncode == _NOT_FOUND:
        why = asked.stderr.strip().splitlines()[-1]
        raise ModuleNotFoundError(f"there is no module {name} in {os.getcwd()} and sys.path: {why}")


def _has_module_file(name: str) -> bool:
    """Whether the module, or the package's `__main__`, lies in a folder; imports no package."""
    top, *parts = name.split(".")
    if not all((top, *parts)):
        return False
    # Finders besides that of folders: of editable installs, zipped and built-in modules.
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
