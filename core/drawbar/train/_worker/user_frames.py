"""Distinguish user frames from frames of Drawbar, libraries, and Python."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import PurePath

from drawbar.train._package_files import is_drawbar_file, is_drawbar_frame

# In any environment, including the per-user site directory.
_SITE_DIRECTORIES = ("site-packages", "dist-packages")
# Other names in angle brackets belong to generated code.
_INTERACTIVE_FILES = ("<stdin>", "<string>", "<ipython-input")
# Resolved, because virtual environments link to the standard library.
_STDLIB_DIRECTORY = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep


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
