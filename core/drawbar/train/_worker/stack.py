"""Where this worker stands: the stacks of its process, as data."""

from __future__ import annotations

import os
import sys
import threading
import traceback
from pathlib import Path

import msgspec

from drawbar.train._worker.user_frames import find_user_frames


class Frame(msgspec.Struct, frozen=True):
    """One line of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """The training thread's frames, outermost first, and the text of all threads, its own first.

    Of a process that is stopped `stopped` says so, and how it goes on, and there is nothing else.
    """

    frames: tuple[Frame, ...] = ()
    text: str
    stopped_reason: str = ""

    @property
    def location(self) -> str:
        """The user's innermost line, and what it called if it stands in there."""
        if self.stopped_reason:
            return self.stopped_reason
        if not self.frames:
            return "not in the training function"
        users = find_user_frames([frame.file for frame in self.frames])
        innermost = self.frames[-1]
        users_innermost = self.frames[users[-1]] if users else innermost
        if users_innermost == innermost:
            return str(innermost)
        return f"{users_innermost}, inside {innermost.function} ({_shorten_path(innermost.file)})"


def capture_stack(thread: threading.Thread | None) -> Stack:
    """Take the stacks of this process; `thread` is the one that runs the training function."""
    frames = sys._current_frames()
    names = {each.ident: each.name for each in threading.enumerate()}
    texts = []
    training: tuple[Frame, ...] = ()
    trains = None if thread is None else thread.ident
    for ident, frame in sorted(frames.items(), key=lambda each: each[0] != trains):
        summary = traceback.extract_stack(frame)
        if ident == trains:
            training = tuple(Frame(f.filename, f.lineno or 0, f.name) for f in summary)
        texts.append(f"Thread {names.get(ident, ident)}:\n" + "".join(summary.format()))
    return Stack(frames=training, text="\n".join(texts))


def detect_stopped_process(pid: int) -> Stack | None:
    """Say that a process of this machine is stopped, and answers nobody; None if it is not.

    It is so by SIGSTOP, Ctrl-Z or a debugger. proc(5) has the states; without /proc it is None.
    """
    try:
        # The program's name is in parentheses, and may have blanks and parentheses itself.
        state = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return None
    if state not in "Tt":
        return None
    told = f"stopped (state {state}): kill -CONT {pid} on {os.uname().nodename}"
    return Stack(text=f"{told}\n", stopped_reason=told)


def _shorten_path(file: str) -> str:
    return "/".join(Path(file).parts[-3:])
