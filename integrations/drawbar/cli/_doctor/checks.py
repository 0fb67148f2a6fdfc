"""What is to be said of machines, by what they tell of themselves. Pure functions."""

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
    """Say what is to be said of one machine."""
    yield _check_gpus(machine)
    yield _check_limit(machine, "open files", machine.open_files, OPEN_FILES, "-n")
    yield _check_limit(machine, "processes", machine.processes, PROCESSES, "-u")
    if machine.shared_memory is not None:
        free, total = machine.shared_memory
        is_low = total < SHARED_MEMORY or free < SHARED_MEMORY / 2
        yield CheckResult(
            "warning" if is_low else "ok",
            "/dev/shm",
            f"{decimal(free)} of {decimal(total)} are free",
            "Ray's objects and torch's loaders lie there: docker run --shm-size=8g"
            if is_low
            else "",
            machine.host,
        )
    for name, (free, total) in machine.disks.items():
        is_low = free < max(FREE_DISK, total // 20)
        yield CheckResult(
            "warning" if is_low else "ok",
            f"disk of {name}",
            f"{decimal(free)} of {decimal(total)} are free",
            "free some, with `drawbar clean` for one; Ray stops at 95 % in use" if is_low else "",
            machine.host,
        )


def _check_gpus(machine: MachineInfo) -> CheckResult:
    subject, count = "GPUs", len(machine.gpus)
    torch = machine.packages.get("torch")
    state: CheckStatus = "ok"
    advice = ""
    found = f"{count} by nvidia-smi, {machine.torch_gpus} by torch" if count else "none"
    if count and torch and machine.torch_cuda is None:
        state, found = "problem", f"{count}, and torch {torch} is built without CUDA"
        advice = "install the torch for your CUDA: https://pytorch.org/get-started/locally"
    elif machine.unsupported_gpus:
        state, found = (
            "problem",
            f"torch {torch} is not built for {', '.join(machine.unsupported_gpus)}",
        )
        advice = "install a torch whose torch.cuda.get_arch_list() has it"
    elif count and torch and machine.torch_gpus < count:
        state = "warning"
        advice = "see CUDA_VISIBLE_DEVICES, and whether the driver fits torch's CUDA " + str(
            machine.torch_cuda
        )
    return CheckResult(state, subject, found, advice, machine.host)


def _check_limit(
    machine: MachineInfo, subject: str, found: int, wanted: int, option: str
) -> CheckResult:
    is_low = 0 <= found < wanted
    advice = f"ulimit {option} {wanted}, before Ray starts there" if is_low else ""
    shown = "no limit" if found < 0 else str(found)
    return CheckResult(
        "warning" if is_low else "ok", f"limit of {subject}", shown, advice, machine.host
    )


def check_consistency(
    machines: Sequence[MachineInfo], offsets: Sequence[float]
) -> Iterator[CheckResult]:
    """Say what is to be said of machines together.

    Args:
        machines: Them.
        offsets: By how many seconds the clock of each is ahead of the one here.
    """
    yield _check_same_version("python", [machine.python for machine in machines], machines)
    for name in COMPARED_PACKAGES:
        found = [machine.packages.get(name, "not installed") for machine in machines]
        if set(found) != {"not installed"}:
            yield _check_same_version(name, found, machines)
    for machine, offset in zip(machines, offsets, strict=True):
        is_skewed = abs(offset) > CLOCK_S
        yield CheckResult(
            "warning" if is_skewed else "ok",
            "clock",
            f"{offset:+.2f} s",
            "have it set by NTP (chrony): failures are put in order by their times" * is_skewed,
            machine.host,
        )


def _check_same_version(
    name: str, found: Sequence[str], machines: Sequence[MachineInfo]
) -> CheckResult:
    if len(set(found)) == 1:
        return CheckResult("ok", name, found[0])
    where = ", ".join(f"{each} on {m.host}" for each, m in zip(found, machines, strict=True))
    return CheckResult("problem", name, where, "install one version on all machines")


def check_requirements() -> Iterator[CheckResult]:
    """Say which packages that are installed here are not those that Drawbar works with."""
    from packaging.requirements import Requirement  # a dependency of Ray

    told = set()
    try:
        needed = requires("drawbar") or ()
    except PackageNotFoundError:
        advice = 'pip install "drawbar"'
        yield CheckResult("warning", "versions", "drawbar runs, and is not installed", advice)
        return
    for each in map(Requirement, needed):
        try:
            found = version(each.name)
        except PackageNotFoundError:
            continue
        if not each.specifier.contains(found, prereleases=True) and each.name not in told:
            told.add(each.name)
            advice = f'pip install "{each.name}{each.specifier}"'
            yield CheckResult("problem", each.name, f"{found}, needed {each.specifier}", advice)
    if not told:
        yield CheckResult("ok", "versions", "those that Drawbar works with")
