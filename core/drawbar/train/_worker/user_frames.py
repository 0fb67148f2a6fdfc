"""Which lines of a stack are the user's, and which are Drawbar's, a library's or Python's own."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import PurePath

from drawbar.train._package_files import is_drawbar_file, is_drawbar_frame

_SITE_DIRECTORIES = (
    "site-packages",
    "dist-packages",
)  # of whatever environment, also the user's own
_INTERACTIVE_FILES = (
    "<stdin>",
    "<string>",
    "<ipython-input",
)  # other names in brackets are of generated code
# By real paths: a virtual environment gets to the standard library by links.
_STDLIB_DIRECTORY = os.path.realpath(sysconfig.get_path("stdlib")) + os.sep


def is_stdlib_file(file: str) -> bool:
    """Whether a file is part of Python itself."""
    return _find_package(file) is None and os.path.realpath(file).startswith(_STDLIB_DIRECTORY)


def find_user_frames(files: Sequence[str]) -> list[int]:
    """Give the indices of the user's lines in a stack; `files`: each line's file, outermost first.

    Where all code is installed, the user's package is the one that Drawbar has called.
    """
    others = [index for index, file in enumerate(files) if not _is_internal_file(file)]
    packages = {index: _find_package(files[index]) for index in others}
    # As soon as one line is of no package, that is the user's, and packages are libraries.
    wanted = None if None in packages.values() else packages[others[0]] if others else None
    return [index for index in others if packages[index] == wanted]


def format_user_location(stack: Sequence[tuple[str, int, str]]) -> str:
    """Give the innermost line that is neither a library's nor Python's own, "" if there is none.

    Args:
        stack: File, line and function of each line, outermost first.
    """
    if not stack:
        return ""
    file, line, function = stack[(find_user_frames([each for each, _, _ in stack]) or [-1])[-1]]
    return f"{file}:{line} in {function}"


def _is_internal_file(file: str) -> bool:
    """Whether a file is Python's own or Drawbar's."""
    if is_stdlib_file(file):
        return True
    is_generated = file.startswith("<") and not file.startswith(_INTERACTIVE_FILES)
    return is_generated or is_drawbar_file(file)


def _find_package(file: str) -> str | None:
    """Give the installed package that a file belongs to, None for a file that is not installed."""
    parts = PurePath(os.path.realpath(file)).parts
    for index, part in enumerate(parts[:-1]):
        if part in _SITE_DIRECTORIES:
            return parts[index + 1]
    return None


def format_caller_location() -> str:
    """Give the innermost line on this thread's stack outside Drawbar as `file:line in function`."""
    # Not `traceback.extract_stack()`, which reads source files: every report() comes through here.
    frame = sys._getframe(1)
    while frame.f_back is not None and is_drawbar_frame(frame):
        frame = frame.f_back
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_name}"
