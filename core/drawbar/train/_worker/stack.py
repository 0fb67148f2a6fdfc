"""Capture the stacks of a worker process as data, and find the user's lines in them."""

from __future__ import annotations

import os
import sys
import sysconfig
import threading
from collections.abc import Sequence
from pathlib import Path, PurePath

import msgspec

from drawbar.train._package_files import is_drawbar_file, is_drawbar_frame
from drawbar.train._protocol.codec import Codec
from drawbar.train._worker.program_main import collect_stacks

# In any environment, including the per-user site directory.
_SITE_DIRECTORIES = ("site-packages", "dist-packages")
# Other names in angle brackets belong to generated code.
_INTERACTIVE_FILES = ("<stdin>", "<string>", "<ipython-input")
# Resolved, because virtual environments link to the standard library.
_STDLIB_DIRECTORY = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep


class Frame(msgspec.Struct, frozen=True):
    """One frame of a stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}"


class Stack(msgspec.Struct, frozen=True, kw_only=True):
    """Stacks of one process.

    Attributes:
        frames: Frames of the training thread, outermost first.
        text: Stacks of all threads as text, the training thread first.
        stopped_reason: If the process is stopped by a signal, a description with the command that
            continues it; `frames` is empty then.
    """

    frames: tuple[Frame, ...] = ()
    text: str
    stopped_reason: str = ""

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


def capture_stack(thread: threading.Thread | None) -> Stack:
    """Return the stacks of this process. `thread` is the thread of the training function."""
    lines, text = collect_stacks(None if thread is None else thread.ident)
    return Stack(frames=tuple(Frame(*line) for line in lines), text=text)


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


def is_stdlib_file(file: str) -> bool:
    """Return whether a file belongs to the standard library."""
    return _find_package(file) is None and os.path.realpath(file).startswith(_STDLIB_DIRECTORY)


def find_user_frames(files: Sequence[str]) -> list[int]:
    """Return the indices of the user's frames in a stack.

    If all code is installed, the user's package is the one that Drawbar called.

    Args:
        files: File of each frame, outermost first.
    """
    indices = [index for index, file in enumerate(files) if not _is_internal_file(file)]
    packages = {index: _find_package(files[index]) for index in indices}
    # If a frame belongs to no package, it is the user's, and all packages are libraries.
    user_package = None if None in packages.values() else packages[indices[0]] if indices else None
    return [index for index in indices if packages[index] == user_package]


def format_user_location(stack: Sequence[tuple[str, int, str]]) -> str:
    """Return the innermost line of the user's code, or "" for an empty stack.

    Args:
        stack: File, line, and function of each frame, outermost first.
    """
    if not stack:
        return ""
    file, line, function = stack[(find_user_frames([path for path, _, _ in stack]) or [-1])[-1]]
    return f"{file}:{line} in {function}"


def _is_internal_file(file: str) -> bool:
    """Return whether a file belongs to Python or Drawbar, or is generated."""
    if is_stdlib_file(file):
        return True
    is_generated = file.startswith("<") and not file.startswith(_INTERACTIVE_FILES)
    return is_generated or is_drawbar_file(file)


def _find_package(file: str) -> str | None:
    """Return the installed package that a file belongs to, or None."""
    parts = PurePath(os.path.realpath(file)).parts
    for index, part in enumerate(parts[:-1]):
        if part in _SITE_DIRECTORIES:
            return parts[index + 1]
    return None


def format_caller_location() -> str:
    """Return the innermost line outside Drawbar on this thread's stack.

    The format is `file:line in function`.
    """
    # Every report() runs this, so avoid `traceback.extract_stack()`, which reads source files.
    frame = sys._getframe(1)
    while frame.f_back is not None and is_drawbar_frame(frame):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
