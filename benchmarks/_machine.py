"""Describe the machine and the package versions."""

from __future__ import annotations

import os
import platform
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

PACKAGES = ("drawbar", "ray", "torch")


def describe_machine(rounds: int) -> dict[str, str]:
    """Name versions, cores, memory and load, as short strings.

    `load` is the 1-minute load average before the run: above about 0.5, something else was running.
    """
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "rounds": str(rounds),
        "python": platform.python_version(),
        **{package: _version(package) for package in PACKAGES},
        "cpu": f"{len(os.sched_getaffinity(0))} x {_cpu_model()}",
        "memory": f"{memory / 2**30:.0f} GiB",
        "kernel": platform.release(),
        "load": f"{os.getloadavg()[0]:.2f}",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
