"""Evaluate machine information. Pure functions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib.metadata import PackageNotFoundError, requires, version

from rich.filesize import decimal

from drawbar.cli._doctor.check_result import CheckResult, CheckStatus
from drawbar.cli._doctor.machine import COMPARED_PACKAGES, MachineInfo

_GB = 10**9
OPEN_FILES = 8192
PROCESSES = 4096
SHARED_MEMORY = 1 * _GB
FREE_DISK = 5 * _GB
CLOCK_S = 1.0


def check_machine(machine: MachineInfo) -> Iterator[CheckResult]:
    """Check the GPUs, limits, fork server, shared memory, and disks of one machine."""
    yield _check_gpus(machine)
    yield _check_limit(machine, "open files", machine.open_files, OPEN_FILES, "-n")
    yield _check_limit(machine, "processes", machine.processes, PROCESSES, "-u")
    yield CheckResult(
        "warning" if machine.fork_obstacle else "ok",
        "forked workers",
        machine.fork_obstacle or "possible",
        "Restarts take longer, because each worker imports for itself."
        if machine.fork_obstacle
        else "",
        machine.host,
    )
    if machine.shared_memory is not None:
        free, total = machine.shared_memory
        is_low = total < SHARED_MEMORY or free < SHARED_MEMORY / 2
        yield CheckResult(
            "warning" if is_low else "ok",
            "/dev/shm",
            f"{decimal(free)} free of {decimal(total)}",
            "Ray and data loaders need it. Use docker run --shm-size=8g." if is_low else "",
            machine.host,
        )
    for name, (free, total) in machine.disks.items():
        is_low = free < max(FREE_DISK, total // 20)
        yield CheckResult(
            "warning" if is_low else "ok",
            f"disk ({name})",
            f"{decimal(free)} free of {decimal(total)}",
            "Free space, for example with 'drawbar clean'. Ray fails at 95% usage."
            if is_low
            else "",
            machine.host,
        )


def _check_gpus(machine: MachineInfo) -> CheckResult:
    subject, count = "GPUs", len(machine.gpus)
    torch = machine.packages.get("torch")
    status: CheckStatus = "ok"
    advice = ""
    value = (
        f"{count} found by nvidia-smi, {machine.torch_gpus} usable by torch" if count else "none"
    )
    if count and torch and machine.torch_cuda is None:
        status, value = "error", f"{count} found, but torch {torch} is built without CUDA"
        advice = "Install torch for your CUDA version: https://pytorch.org/get-started/locally"
    elif machine.unsupported_gpus:
        status = "error"
        value = f"torch {torch} does not support {', '.join(machine.unsupported_gpus)}"
        advice = "Install a torch build for this GPU."
    elif count and torch and machine.torch_gpus < count:
        status = "warning"
        advice = (
            f"Check CUDA_VISIBLE_DEVICES and that the driver supports CUDA {machine.torch_cuda}."
        )
    return CheckResult(status, subject, value, advice, machine.host)


def _check_limit(
    machine: MachineInfo, subject: str, limit: int, minimum: int, option: str
) -> CheckResult:
    is_low = 0 <= limit < minimum
    advice = f"Run 'ulimit {option} {minimum}' before starting Ray." if is_low else ""
    value = "no limit" if limit < 0 else str(limit)
    return CheckResult(
        "warning" if is_low else "ok", f"{subject} limit", value, advice, machine.host
    )


def check_consistency(
    machines: Sequence[MachineInfo], offsets: Sequence[float]
) -> Iterator[CheckResult]:
    """Compare the versions and clocks of all machines.

    Args:
        machines: Information about each machine.
        offsets: Seconds by which the clock of each machine is ahead of this one.
    """
    yield _check_same_version("python", [machine.python for machine in machines], machines)
    for name in COMPARED_PACKAGES:
        versions = [machine.packages.get(name, "not installed") for machine in machines]
        if set(versions) != {"not installed"}:
            yield _check_same_version(name, versions, machines)
    for machine, offset in zip(machines, offsets, strict=True):
        is_skewed = abs(offset) > CLOCK_S
        yield CheckResult(
            "warning" if is_skewed else "ok",
            "clock",
            f"{abs(offset):.2f} s {'ahead' if offset >= 0 else 'behind'}",
            "Synchronize it with NTP; failures are ordered by time." * is_skewed,
            machine.host,
        )


def _check_same_version(
    name: str, versions: Sequence[str], machines: Sequence[MachineInfo]
) -> CheckResult:
    if len(set(versions)) == 1:
        return CheckResult("ok", name, versions[0])
    value = ", ".join(
        f"{version} on {machine.host}" for version, machine in zip(versions, machines, strict=True)
    )
    return CheckResult("error", name, value, "Install the same version on all machines.")


def check_requirements() -> Iterator[CheckResult]:
    """Check that the installed packages have versions that Drawbar supports."""
    from packaging.requirements import Requirement  # a dependency of Ray

    incompatible = set()
    try:
        requirements = requires("drawbar") or ()
    except PackageNotFoundError:
        advice = "Install Drawbar with pip, so that the versions of its packages are checked."
        yield CheckResult("warning", "versions", "drawbar is not installed as a package", advice)
        return
    for requirement in map(Requirement, requirements):
        name, specifier = requirement.name, requirement.specifier
        try:
            installed = version(name)
        except PackageNotFoundError:
            continue
        if not specifier.contains(installed, prereleases=True) and name not in incompatible:
            incompatible.add(name)
            advice = f'Install a supported version with: pip install "{name}{specifier}"'
            yield CheckResult("error", name, f"{installed}, needed {specifier}", advice)
    if not incompatible:
        yield CheckResult("ok", "versions", "compatible")
