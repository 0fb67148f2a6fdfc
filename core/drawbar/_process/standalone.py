"""Functions for processes that do not import Drawbar, too.

`program_main.py` imports this file by path; it uses only the standard library.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable


def get_builtin_type(error: BaseException) -> str:
    """Return the name of the nearest built-in class of an exception."""
    return next(cls.__name__ for cls in type(error).__mro__ if cls.__module__ == "builtins")


def collect_stacks(
    training_thread: int | None, is_runner_file: Callable[[str], bool]
) -> tuple[list[tuple[str, int, str]], str]:
    """Return the stacks of this process.

    Args:
        training_thread: Identifier of the thread that runs the user's code, if it runs.
        is_runner_file: Whether a file belongs to the code that calls the user's code.

    Returns:
        Frames of that thread as (file, line, function), and the stacks of all threads as text. That
        thread comes first, without the frames above the user's code.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    texts, lines = [], []
    frames = sys._current_frames()
    for ident, frame in sorted(frames.items(), key=lambda item: item[0] != training_thread):
        stack = traceback.extract_stack(frame)
        title = f"Thread {names.get(ident, ident)}"
        if ident == training_thread:
            lines = [(entry.filename, entry.lineno or 0, entry.name) for entry in stack]
            title += " (training)"
            while len(stack) > 1 and is_runner_file(stack[0].filename):
                stack.pop(0)
        texts.append(f"{title}:\n" + "".join(stack.format()))
    return lines, "\n".join(texts)
