"""Tell Drawbar's own files and stack frames from those of users and libraries."""

from __future__ import annotations

import functools
import os
from types import FrameType

import drawbar


def is_drawbar_file(file: str) -> bool:
    """Whether a source file belongs to Drawbar, installed or in a checkout."""
    return _is_in_packages(file, tuple(drawbar.__path__))


def is_drawbar_frame(frame: FrameType) -> bool:
    """Whether a frame runs code of Drawbar, also code that a dataclass has generated for it."""
    # By the file of the module: generated code has no file.
    file: str | None = frame.f_globals.get("__file__")
    return bool(file) and is_drawbar_file(str(file))


# Cached: every report() looks at the frames that lead to it.
@functools.lru_cache(maxsize=4096)
def _is_in_packages(file: str, portions: tuple[str, ...]) -> bool:
    return os.path.realpath(file).startswith(_package_folders(portions))


@functools.lru_cache
def _package_folders(portions: tuple[str, ...]) -> tuple[str, ...]:
    """Return the folders of Drawbar's packages, each with a separator at its end.

    `drawbar` is a namespace package, so every folder of this name beside an entry of `sys.path` is
    one of its portions, for example a checkout in which the user works. Only the typed packages in
    a portion are Drawbar's.
    """
    folders = []
    for portion in portions:
        names = os.listdir(portion) if os.path.isdir(portion) else []
        for folder in (os.path.join(portion, name) for name in names):
            if all(os.path.exists(os.path.join(folder, f)) for f in ("__init__.py", "py.typed")):
                folders.append(os.path.realpath(folder) + os.sep)
    return tuple(folders)
