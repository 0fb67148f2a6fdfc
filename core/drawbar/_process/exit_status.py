"""Describe why a worker process ended.

There are three sources, best first: Ray's error, if its memory monitor killed the worker; the
report of the sentinel (`_process/sentinel.py`), with the exit status and whether the kernel's OOM
killer was active; and the output of faulthandler during a crash. Any of them may be missing.
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

from drawbar._base.wording import format_size

_FATAL_ERROR = "Fatal Python error: "
_MAX_CRASH_LINES = 40
_CLOCK_SKEW_SECONDS = 60.0  # between nodes

# Names that faulthandler uses for the signals it catches (Modules/faulthandler.c).
_SIGNALS_BY_FAULT = {
    "Segmentation fault": "SIGSEGV",
    "Aborted": "SIGABRT",
    "Bus error": "SIGBUS",
    "Floating point exception": "SIGFPE",
    "Floating-point exception": "SIGFPE",
    "Illegal instruction": "SIGILL",
}

# Ray's message when its memory monitor kills a worker, as of 2.60: "... due to the node running
# low on memory. Memory on the node (IP: ...) was 22.9GB used / 23.5GB limit (0.97)"; older releases
# append ", which exceeds the memory usage threshold of 0.95. Ray killed this worker ...".
_RAY_OOM = re.compile(r"(Memory on the node .*?)(?:\. Ray killed|$)", re.MULTILINE)


class ExitReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of the sentinel about the end of a worker.

    Attributes:
        pid: Process ID.
        status: Wait status (`os.waitpid`), or None if the kernel does not provide it.
        time: Time of the end, in seconds since the epoch.
        oom_kill: Whether the OOM killer killed a process in the worker's cgroup during its
            lifetime, or None if the kernel does not count it.
        rss: Last known resident memory in bytes, at most a second old.
        num_batches: Batches that the rank has received since its last report; None if unknown.
    """

    pid: int
    status: int | None
    time: float
    oom_kill: bool | None
    rss: int | None
    num_batches: int | None = None


# Once for all threads: msgspec can crash if two threads use a type for the first time.
_report_decoder = msgspec.json.Decoder(ExitReport)


def read_exit_report(report_file: Path) -> ExitReport | None:
    """Return the report of the sentinel, or None if there is none (yet)."""
    try:
        return _report_decoder.decode(report_file.read_bytes())
    except (OSError, msgspec.DecodeError):
        return None


async def wait_for_exit_report(report_file: Path, timeout_s: float) -> ExitReport | None:
    """Wait for the report of the sentinel, which normally exists milliseconds after the death.

    Returns:
        The report, or None after `timeout_s` seconds: no sentinel ran, it was killed too, or its
        node is lost.
    """
    return await _poll(lambda: read_exit_report(report_file), timeout_s)


async def wait_for_report_of_pid(
    directory: Path, pid: int, since: float, timeout_s: float
) -> ExitReport | None:
    """Wait for the report of a process whose host is unknown.

    Args:
        directory: Directory of the exit reports.
        pid: Process ID.
        since: Ignore reports from before this time (seconds since the epoch), which belong to other
            processes with the same ID.
        timeout_s: Maximum number of seconds to wait.
    """

    def find() -> ExitReport | None:
        reports = [read_exit_report(file) for file in directory.glob(f"*-{pid}.json")]
        recent = [
            report for report in reports if report and report.time > since - _CLOCK_SKEW_SECONDS
        ]
        return max(recent, key=lambda report: report.time, default=None)

    return await _poll(find, timeout_s)


async def _poll(find: Callable[[], ExitReport | None], timeout_s: float) -> ExitReport | None:
    deadline = time.monotonic() + timeout_s
    # Polling: the sentinel is not a child of this process, and network filesystems emit no events.
    while (report := find()) is None and time.monotonic() < deadline:
        await asyncio.sleep(0.005)
    return report


def startup_verdict(report: ExitReport | None, ray_error: str) -> str:
    """Return why a worker process ended before the training function started, in one sentence.

    Args:
        report: Report of the sentinel, or None.
        ray_error: Ray's error about the dead actor. It is the only source for a process that died
            before its sentinel started.
    """
    if report is not None or _RAY_OOM.search(ray_error):
        return describe_exit(report, ray_error, "")
    lines = [line for line in ray_error.splitlines() if line.strip() and not line.startswith("\t")]
    # For an exception in a constructor, Ray's text ends with it. Otherwise line one is a headline.
    return lines[-1].strip() if "\nTraceback" in ray_error else " ".join(lines[1:] or lines)


def describe_exit(report: ExitReport | None, ray_error: str, faulthandler_log: str) -> str:
    """Return why a worker process ended, in one sentence.

    Args:
        report: Report of the sentinel, or None.
        ray_error: Ray's error about the dead actor.
        faulthandler_log: Output of faulthandler, or "". If it contains a crash, the sentence is
            followed by its first stacks, on separate lines.
    """
    # Before the status, which would show SIGKILL without its sender.
    out_of_memory = _RAY_OOM.search(ray_error)
    if out_of_memory:
        return f"killed by Ray's memory monitor: {out_of_memory[1].strip()}"
    # Needed even if there is a status: the status has the signal, and faulthandler the stack.
    crash = _extract_crash(faulthandler_log)
    if report is None or report.status is None:
        return _describe_unknown_status(report, crash)
    if os.WIFSIGNALED(report.status):
        return _describe_signal(_get_signal_name(os.WTERMSIG(report.status)), report, crash)
    code = os.waitstatus_to_exitcode(report.status)
    return f"exited with code {code} by os._exit or sys.exit"


def _extract_crash(faulthandler_log: str) -> str:
    """Return the description of a crash in a faulthandler log, without the list of loaded modules.

    The stack of the crashed thread comes first, because the text is truncated.
    """
    _, header, description = faulthandler_log.rpartition(_FATAL_ERROR)
    if not header:
        return ""
    cause, *stacks = description.partition("\nExtension modules:")[0].strip().split("\n\n")
    stacks.sort(key=lambda stack: not stack.startswith("Current thread"))
    text = "\n\n".join([header + cause, *stacks])
    return "\n".join(text.splitlines()[:_MAX_CRASH_LINES])


def _describe_signal(name: str, report: ExitReport | None, crash: str) -> str:
    if name == "SIGKILL":
        return f"killed by SIGKILL{_describe_killer(report)}"
    return f"killed by {name}: {crash}" if crash else f"killed by {name}"


def _describe_unknown_status(report: ExitReport | None, crash: str) -> str:
    if crash:
        fault = crash.removeprefix(_FATAL_ERROR).splitlines()[0].strip()
        return _describe_signal(_SIGNALS_BY_FAULT.get(fault, "a fatal error"), report, crash)
    if report is not None and report.oom_kill:
        return f"probably killed{_describe_killer(report)}"
    return "for an unknown reason, such as SIGKILL from outside or os._exit"


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
