"""Capture the stacks of a worker process as data."""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from pathlib import Path

import msgspec

from drawbar._base.frames import find_user_frames, is_internal_file
from drawbar._process.batch_counter import format_place
from drawbar._process.codec import Codec
from drawbar._process.collective_calls import GroupCalls, read_collective_calls
from drawbar._process.standalone import collect_stacks


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One frame of a stack. It is encoded as [file, line, function]."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """Stacks of one process.

    Attributes:
        frames: Frames of the training thread, outermost first.
        text: Stacks of all threads as text, the training thread first, from the user's code on.
        stopped_reason: If the process is stopped by a signal, a description with the command that
            continues it; `frames` is empty then.
        num_batches: Batches since the last report; None if the position in the data is unknown.
        report_index: Number of the next report in the run.
        log_size: Size of the log of the rank in bytes; 0 if it is unknown.
        cpu_seconds: CPU time that the training thread has used; 0 if it is unknown.
        collective_calls: Latest collectives of the process in a framework.
    """

    frames: tuple[Frame, ...] = ()
    text: str
    stopped_reason: str = ""
    num_batches: int | None = None
    report_index: int = 0
    log_size: int = 0
    cpu_seconds: float = 0.0
    collective_calls: tuple[GroupCalls, ...] = ()

    @property
    def data_position(self) -> str:
        """Position of the rank in the data, such as "batch 3 after 7 reports", "" if unknown."""
        return "" if self.num_batches is None else format_place(self.num_batches, self.report_index)

    @property
    def location(self) -> str:
        """Innermost line of the user's code, and the innermost frame if it is in other code."""
        if self.stopped_reason:
            return self.stopped_reason
        if not self.frames:
            return "not in the training function"
        user_indices = find_user_frames([frame.file for frame in self.frames])
        innermost = self.frames[-1]
        user_frame = self.frames[user_indices[-1]] if user_indices else innermost
        if user_frame == innermost:
            return str(innermost)
        return f"{user_frame}, inside {innermost.function} ({_shorten_path(innermost.file)})"


STACK = Codec[Stack | None](Stack | None)


def capture_stack(
    thread: threading.Thread | None,
    log_size: int,
    num_batches: int | None = None,
    report_index: int = 0,
) -> Stack:
    """Return the stacks of this process.

    Args:
        thread: Thread of the training function, which may have ended; None if it has not started.
        log_size: Size of the log of the rank in bytes.
        num_batches: Batches since the last report; None if the position in the data is unknown.
        report_index: Number of the next report in the run.
    """
    if thread is not None and not thread.is_alive():
        thread = None  # another thread may have its identifier now
    lines, text = collect_stacks(None if thread is None else thread.ident, is_internal_file)
    return Stack(
        frames=tuple(Frame(*line) for line in lines),
        text=text,
        num_batches=num_batches,
        report_index=report_index,
        log_size=log_size,
        cpu_seconds=0.0 if thread is None else _read_cpu_seconds(thread),
        collective_calls=read_collective_calls(),
    )


def format_positions(stacks: Mapping[int, Stack | None]) -> str:
    """Return one line with the position of each rank in the data; "" if one is unknown."""
    ranks: dict[str, list[int]] = {}
    for rank, stack in sorted(stacks.items()):
        ranks.setdefault("" if stack is None else stack.data_position, []).append(rank)
    if "" in ranks or not ranks:
        return ""
    if len(ranks) == 1:
        return f"\n  data: {next(iter(ranks))} on all ranks"
    texts = (f"{position} ({', '.join(map(str, group))})" for position, group in ranks.items())
    return f"\n  data by rank: {', '.join(texts)}"


def _read_cpu_seconds(thread: threading.Thread) -> float:
    """Return the CPU time of a thread of this process; 0 if it is unknown. See proc(5)."""
    try:
        text = Path(f"/proc/self/task/{thread.native_id}/stat").read_text(errors="replace")
    except OSError:  # it has just ended, or the system has no /proc
        return 0.0
    return sum(map(int, text.rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")


def detect_stopped_process(pid: int) -> Stack | None:
    """Return a description if a process on this machine is stopped and cannot reply, else None.

    Processes are stopped by SIGSTOP, Ctrl-Z, or a debugger. See proc(5) for the states. Returns
    None on systems without /proc.
    """
    try:
        # The second field is the name, which may contain spaces and parentheses.
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    if state not in "Tt":
        return None
    reason = f"stopped (state {state}): kill -CONT {pid} on {os.uname().nodename}"
    return Stack(text=f"{reason}\n", stopped_reason=reason)


def _shorten_path(file: str) -> str:
    return "/".join(Path(file).parts[-3:])
