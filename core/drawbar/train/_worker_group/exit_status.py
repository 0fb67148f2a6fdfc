"""Why a worker process ended, in one sentence, from whatever is known about it.

The sources, the best first: Ray's own account when its memory monitor killed the worker; the
report of the sentinel (`_worker/sentinel.py`), which has the exit status and whether the kernel's
OOM killer was at work; and what faulthandler wrote while the process crashed. Any may be missing.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import msgspec

from drawbar.train._storage.sizes import format_size

_FATAL_ERROR = "Fatal Python error: "
_MAX_CRASH_LINES = 40
_CLOCK_SKEW_SECONDS = 60.0  # between nodes

# What faulthandler calls the signals that it catches (Modules/faulthandler.c), by name.
_SIGNALS_BY_FAULT = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}

# Ray's words when its memory monitor kills a worker, as seen in 2.60: "... due to the node running
# low on memory. Memory on the node (IP: ...) was 22.9GB used / 23.5GB limit (0.97)"; older releases
# go on with ", which exceeds the memory usage threshold of 0.95. Ray killed this worker ...".
_RAY_OOM = re.compile(r"(Memory on the node .*?)(?:\. Ray killed|$)", re.MULTILINE)


class ExitReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the sentinel saw of a worker's end.

    `status` is a wait status (`os.waitpid`), None where the kernel does not tell it. `time` is in
    seconds since the epoch. `oom_kill` says whether the OOM killer took a victim in the worker's
    cgroup during its life, None if that is not counted. `rss` is the last known resident memory in
    bytes, at most a second old.
    """

    pid: int
    status: int | None
    time: float
    oom_kill: bool | None
    rss: int | None


def read_exit_report(report_file: Path) -> ExitReport | None:
    """Read what the sentinel wrote, or None if there is no report (yet)."""
    try:
        return msgspec.json.decode(report_file.read_bytes(), type=ExitReport)
    except (OSError, msgspec.DecodeError):
        return None


async def wait_for_exit_report(report_file: Path, timeout_s: float) -> ExitReport | None:
    """Wait until the sentinel's report exists, normally a few milliseconds after the death.

    Returns:
        None after `timeout_s` seconds: no sentinel ran, it was killed too, or its node is lost.
    """
    return await _poll(lambda: read_exit_report(report_file), timeout_s)


async def wait_for_report_of_pid(
    folder: Path, pid: int, since: float, timeout_s: float
) -> ExitReport | None:
    """Wait for the report of a process whose host is unknown.

    Args:
        folder: Folder of the exit reports.
        pid: Process id.
        since: Reports from before this time, in seconds since the epoch, are of other processes.
        timeout_s: How long to wait.
    """

    def find() -> ExitReport | None:
        reports = [read_exit_report(file) for file in folder.glob(f"*-{pid}.json")]
        recent = [each for each in reports if each and each.time > since - _CLOCK_SKEW_SECONDS]
        return max(recent, key=lambda report: report.time, default=None)

    return await _poll(find, timeout_s)


async def _poll(find: Callable[[], ExitReport | None], timeout_s: float) -> ExitReport | None:
    deadline = time.monotonic() + timeout_s
    # Polled: the sentinel is not a child of this process, and network filesystems send no events.
    while (report := find()) is None and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    return report


def startup_verdict(report: ExitReport | None, ray_error: str) -> str:
    """Return why a worker process ended before the training function started, in one sentence.

    Args:
        report: The sentinel's report, if there is one.
        ray_error: Ray's error for the dead actor, as text. It is all that is known of a process
            that died before it had a sentinel.
    """
    if report is not None or _RAY_OOM.search(ray_error):
        return describe_exit(report, ray_error, "")
    lines = [line for line in ray_error.splitlines() if line.strip() and not line.startswith("\t")]
    # An exception in a constructor: Ray's text ends with it. Else the first line is a headline.
    return lines[-1].strip() if "\nTraceback" in ray_error else " ".join(lines[1:] or lines)


def describe_exit(report: ExitReport | None, ray_error: str, faulthandler_log: str) -> str:
    """Say in one sentence why a worker process ended.

    Args:
        report: The sentinel's report, if there is one.
        ray_error: Ray's error for the dead actor, as text.
        fault_log: What faulthandler wrote, or "". If it tells of a crash, the sentence ends with
            its text, the first stacks on the lines that follow.
    """
    # Before the status, which would say SIGKILL, and not by whom.
    out_of_memory = _RAY_OOM.search(ray_error)
    if out_of_memory:
        return f"killed by Ray's memory monitor: {out_of_memory[1].strip()}"
    # Also where there is a status: that of a crash says which signal, and faulthandler where.
    crash = _extract_crash(faulthandler_log)
    if report is None or report.status is None:
        return _describe_unknown_status(report, crash)
    if os.WIFSIGNALED(report.status):
        return _describe_signal(_get_signal_name(os.WTERMSIG(report.status)), report, crash)
    code = os.waitstatus_to_exitcode(report.status)
    return f"exited with code {code} by os._exit or sys.exit"


def _extract_crash(faulthandler_log: str) -> str:
    """Cut faulthandler's account of a crash out of its log, without the list of loaded modules.

    The stack of the thread that crashed comes first, in case there is no room for all.
    """
    _, found, account = faulthandler_log.rpartition(_FATAL_ERROR)
    if not found:
        return ""
    what, *stacks = account.partition("\nExtension modules:")[0].strip().split("\n\n")
    stacks.sort(key=lambda stack: not stack.startswith("Current thread"))
    text = "\n\n".join([found + what, *stacks])
    return "\n".join(text.splitlines()[:_MAX_CRASH_LINES])


def _describe_signal(name: str, report: ExitReport | None, crash: str) -> str:
    if name == "SIGKILL":
        return f"killed by SIGKILL{_describe_killer(report)}"
    return f"killed by {name}: {crash}" if crash else f"killed by {name}"


def _describe_unknown_status(report: ExitReport | None, crash: str) -> str:
    if crash:
        caught = crash.removeprefix(_FATAL_ERROR).splitlines()[0].strip()
        return _describe_signal(_SIGNALS_BY_FAULT.get(caught, "a fatal error"), report, crash)
    if report is not None and report.oom_kill:
        return f"vanished, probably killed{_describe_killer(report)}"
    return "vanished without a trace: SIGKILL from outside, or os._exit"


def _describe_killer(report: ExitReport | None) -> str:
    if report is None:
        return ""
    memory = f", last RSS {format_size(report.rss)}" if report.rss else ""
    if report.oom_kill:
        return f", by the kernel's OOM killer: the cgroup's oom_kill count rose{memory}"
    if report.oom_kill is None:
        return f", from outside{memory}"
    return f", from outside, not by the kernel's OOM killer (its count did not rise){memory}"


def _get_signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
