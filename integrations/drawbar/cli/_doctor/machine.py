"""Collect versions, GPUs, limits, memory, and disks of a machine."""

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

from drawbar.train.testing import find_fork_obstacle

_PROGRAM_TIMEOUT_S = 60.0

COMPARED_PACKAGES = ("drawbar", "ray", "cloudpickle", "msgspec", "torch", "numpy", "pyarrow")
"""Packages that need the same version on all machines, because their objects are exchanged."""


@dataclass(frozen=True, kw_only=True)
class MachineInfo:
    """Versions, GPUs, limits, memory, and disks of a machine.

    Attributes:
        host: Host name.
        python: Python version.
        packages: Versions of the installed packages of `COMPARED_PACKAGES`.
        gpus: GPU names, as listed by nvidia-smi.
        torch_cuda: CUDA version of the torch build; None without CUDA or torch.
        torch_gpus: Number of GPUs that torch can use.
        unsupported_gpus: GPUs, with their compute capability, that the torch build lacks.
        open_files: Soft limit of open files; -1 for no limit.
        processes: Soft limit of processes; -1 for no limit.
        fork_obstacle: Why workers start without a fork server, "" if they are forked.
        shared_memory: Free and total bytes of /dev/shm; None if it does not exist.
        disks: Free and total bytes of each disk, by its purpose.
        clock: Current time in seconds since the epoch.
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
    fork_obstacle: str
    shared_memory: tuple[int, int] | None
    disks: dict[str, tuple[int, int]] = field(default_factory=dict)
    clock: float = 0.0


def collect(storage: str) -> MachineInfo:
    """Collect information about this machine.

    Args:
        storage: Local storage path whose disk is included; "" for none.
    """
    cuda, usable, unsupported = _query_torch()
    return MachineInfo(
        host=socket.gethostname(),
        python=platform.python_version(),
        packages={name: installed for name in COMPARED_PACKAGES if (installed := _version(name))},
        gpus=_gpus(),
        torch_cuda=cuda,
        torch_gpus=usable,
        unsupported_gpus=unsupported,
        open_files=resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        processes=resource.getrlimit(resource.RLIMIT_NPROC)[0],
        fork_obstacle=find_fork_obstacle(),
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
    """Query torch in a subprocess: importing it here would use memory and initialize GPUs."""
    if not _version("torch"):
        return None, 0, []
    lines = _run(sys.executable, "-c", _QUERY_TORCH_SCRIPT)
    if _TORCH_MARKER not in lines:
        return None, 0, []
    cuda, count, *unsupported = lines[lines.index(_TORCH_MARKER) + 1 :]
    return cuda or None, int(count), unsupported


def _run(*command: str) -> list[str]:
    """Return the output lines of a program; [] if it fails or exceeds the timeout."""
    try:
        process = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PROGRAM_TIMEOUT_S,
        )
    except (OSError, subprocess.TimeoutExpired):  # for example a GPU driver that hangs
        return []
    return process.stdout.splitlines() if process.returncode == 0 else []


_TORCH_MARKER = "torch information:"
_QUERY_TORCH_SCRIPT = f"""
import torch
print("{_TORCH_MARKER}")
print(torch.version.cuda or "")
count = torch.cuda.device_count() if torch.cuda.is_available() else 0
print(count)
built_for = [name.split("_")[1].rstrip("a") for name in torch.cuda.get_arch_list()]
for index in range(count):
    major, minor = torch.cuda.get_device_capability(index)
    is_supported = any(arch[:-1] == str(major) and int(arch[-1]) <= minor for arch in built_for)
    if not is_supported:
        print(f"{{torch.cuda.get_device_name(index)}} (sm_{{major}}{{minor}})")
"""


def _disks(storage: str) -> dict[str, tuple[int, int]]:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    paths = {"temporary files": Path(tempfile.gettempdir()), "work directories": cache}
    if storage and "://" not in storage:
        paths["storage path"] = Path(storage)
    usages = {name: _disk_usage(_nearest_existing(path)) for name, path in paths.items()}
    return {name: usage for name, usage in usages.items() if usage is not None}


def _nearest_existing(path: Path) -> Path:
    return next((parent for parent in (path, *path.parents) if parent.exists()), Path("/"))


def _disk_usage(path: Path) -> tuple[int, int] | None:
    try:
        usage = shutil.disk_usage(path)
    except OSError:
        return None
    return usage.free, usage.total
