"""What one machine tells of itself: versions, GPUs, limits, memory, disks. Runs on that machine."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

_PATIENCE_S = 60.0

COMPARED_PACKAGES = ("drawbar", "ray", "cloudpickle", "msgspec", "torch", "numpy", "pyarrow")
"""The packages that must be the same on all machines: their objects travel between them."""


@dataclass(frozen=True, kw_only=True)
class MachineInfo:
    """What a machine tells of itself.

    Attributes:
        host: Its name.
        python: Version of Python.
        packages: Versions of those of `COMPARED` that are installed.
        gpus: Names of its GPUs, as the driver lists them.
        torch_cuda: The CUDA that torch was built for; None without, or without torch.
        torch_gpus: How many GPUs torch can use.
        unsupported: The GPUs, with their capability, that torch was not built for.
        open_files, processes: Soft limits; -1 if there is none.
        shared_memory: Bytes of /dev/shm, all and free; None without it.
        disks: Free bytes, and all, by what lies there.
        clock: Its time, in seconds since the epoch.
    """

    host: str
    python: str
    packages: dict[str, str]
    gpus: list[str]
    torch_cuda: str | None
    torch_gpus: int
    unsupported_gpus: list[str]
    open_files: int
    processes: int
    shared_memory: tuple[int, int] | None
    disks: dict[str, tuple[int, int]] = field(default_factory=dict)
    clock: float = 0.0


def collect(storage: str) -> MachineInfo:
    """Look at this machine.

    Args:
        storage: A local storage path, whose disk is looked at too; "" if there is none.
    """
    cuda, usable, unsupported = _query_torch()
    return MachineInfo(
        host=socket.gethostname(),
        python=platform.python_version(),
        packages={name: found for name in COMPARED_PACKAGES if (found := _version(name))},
        gpus=_gpus(),
        torch_cuda=cuda,
        torch_gpus=usable,
        unsupported_gpus=unsupported,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[0],
        shared_memory=_disk_usage(Path("/dev/shm")),
        disks=_disks(storage),
        clock=time.time(),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _gpus() -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    return [line for line in _run(command, "-L") if line.startswith("GPU ")]


def _query_torch() -> tuple[str | None, int, list[str]]:
    """Ask torch in a process of its own: here, importing it would take memory and GPUs."""
    if not _version("torch"):
        return None, 0, []
    told = _run(sys.executable, "-c", _ASK_TORCH)
    if _TORCH_MARKER not in told:
        return None, 0, []
    cuda, count, *unsupported = told[told.index(_TORCH_MARKER) + 1 :]
    return cuda or None, int(count), unsupported


def _run(*command: str) -> list[str]:
    """Give the lines that a program writes; none if it fails, or does not end."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE_S,
        )
    except (OSError, subprocess.TimeoutExpired):  # a driver that hangs, say
        return []
    return done.stdout.splitlines() if done.returncode == 0 else []


_TORCH_MARKER = "torch tells:"
_ASK_TORCH = f"""
import torch
print("{_TORCH_MARKER}")
print(torch.version.cuda or "")
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(count)
built_for = [name.split("_")[1].rstrip("a") for name in torch.cuda.get_arch_list()]
highest = max((int(each) for each in built_for), default=0)
for index in range(count):
    major, minor = torch.cuda.get_device_capability(index)
    known = any(each[:-1] == str(major) and int(each[-1]) <= minor for each in built_for)
    if not known:
        print(f"{{torch.cuda.get_device_name(index)}} (sm_{{major}}{{minor}})")
"""


def _disks(storage: str) -> dict[str, tuple[int, int]]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    places = {"temporary files": Path(tempfile.gettempdir()), "work folders": cache}
    if storage and "://" not in storage:
        places["storage path"] = Path(storage)
    found = {name: _disk_usage(_nearest_existing(path)) for name, path in places.items()}
    return {name: space for name, space in found.items() if space is not None}


def _nearest_existing(path: Path) -> Path:
    return next((each for each in (path, *path.parents) if each.exists()), Path("/"))


def _disk_usage(path: Path) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.free, usage.total
