"""Conditions under which a process that has imported modules may fork workers.

The fork servers run by path and import this file by path; it uses only the standard library.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.machinery
import os
import site
import sys
import threading
from collections.abc import Iterable

UNSAFE_MODULES = {
    "jax": "it starts threads",
    "jaxlib": "it starts threads",
    "tensorflow": "it starts threads",
    "grpc": "it starts threads",
}

SERVER_VARIABLES = {"PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
"""Variables for the imports only, not for workers.

Some modules request the GPUs from torch when they are imported, which must not initialize CUDA.
"""


class ImportedFiles:
    """Files of all imported modules, as they were when they were imported.

    Args:
        others: Other files on which the imports depend.
    """

    def __init__(self, others: Iterable[str] = ()) -> None:
        modules = [(name, _get_file(module)) for name, module in sys.modules.items()]
        # A new package, or a new line of the import path, changes the folder of all packages.
        folders = [*site.getsitepackages(), site.getusersitepackages()]
        files = {*others, *folders, *(file for _, file in modules if file)}
        self._versions = {file: _get_version(file) for file in files}
        # Modules that another finder has found, for example of an editable package, are not here.
        self._found = {
            name: file for name, file in modules if "." not in name and file == _find_file(name)
        }

    def have_changed(self) -> bool:
        """Return whether a fresh process might import something else."""
        importlib.invalidate_caches()
        return any(_get_version(file) != old for file, old in self._versions.items()) or any(
            _find_file(name) != file for name, file in self._found.items()
        )


def prepare_imports() -> None:
    """Set the variables of a server in this process."""
    os.environ.update(SERVER_VARIABLES)


def import_modules(modules: Iterable[str], optional_modules: Iterable[str]) -> str:
    """Import modules, and the optional modules that exist.

    Returns:
        Why this process must not fork workers, "" if it may.
    """
    prepare_imports()
    for name in optional_modules:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for name in modules:
        try:
            importlib.import_module(name)
        except BaseException as error:
            return f"import {name} raised {type(error).__name__}: {error}"
        if reason := find_obstacle():
            return f"import {name} {reason}"
    return ""


def find_obstacle() -> str:
    """Return why this process must not fork workers after its imports, "" if it may."""
    for name, reason in UNSAFE_MODULES.items():
        if name in sys.modules:
            return f"imported {name}, which must not be forked: {reason}"
    if threading.active_count() > 1:
        names = [thread.name for thread in threading.enumerate()[1:]]
        return f"started threads, which a fork would lose: {names}"
    # CUDA opens the device of its unified memory. NVML, which only counts GPUs, does not.
    devices = [file for file in list_open_files() if file.startswith("/dev/nvidia-uvm")]
    if devices:
        return f"initialized CUDA, which a forked process cannot use: {devices}"
    return ""


def list_open_files() -> list[str]:
    """Return the files that this process has open, as in `/proc/self/fd`."""
    files = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the descriptor of the listed directory
            files.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return files


def _get_file(module: object) -> str | None:
    spec = getattr(module, "__spec__", None)
    return spec.origin if spec is not None and spec.has_location else None


def _get_version(file: str) -> tuple[int, int] | None:
    try:
        status = os.stat(file)
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size


def _find_file(name: str) -> str | None:
    spec = importlib.machinery.PathFinder.find_spec(name)
    return spec.origin if spec is not None else None


def read_node_id() -> str:
    """Return the ID of the running kernel and of the process namespace, which a container has."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}:{os.stat('/proc/self/ns/pid').st_ino}"


def read_start_time(pid: int) -> str:
    """Return the start time of a process, which a later process of the same ID does not share."""
    try:
        with open(f"/proc/{pid}/stat", errors="replace") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return ""
