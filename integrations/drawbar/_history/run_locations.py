"""Find the run of a path or name, and the runs with similar names."""

from __future__ import annotations

import contextlib
import difflib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drawbar._process.errors import CheckpointError
from drawbar._storage.default_storage import get_default_storage_path
from drawbar._storage.filesystem import AnyFileSystem, resolve_path
from drawbar._storage.journal_file import JOURNAL_FILE
from drawbar._storage.storage_path import LocalPath, StoragePath

MAX_DEPTH = 4
"""Depth of the directories that are searched for runs: a storage may also contain datasets."""

_MAX_SUGGESTIONS = 3


@dataclass(frozen=True)
class RunLocation:
    """Directory of a run that may not exist.

    Attributes:
        storage: Storage path to which the name belongs.
        name: Name of the run in the storage; may contain directories.
    """

    storage: StoragePath
    name: str

    @property
    def path(self) -> StoragePath:
        """Directory of the run."""
        return self.storage / self.name

    def find_similar_names(self) -> list[str]:
        """Return the names of the most similar runs, most similar first."""
        typed, names = self.name.casefold(), dict[str, str]()
        with contextlib.suppress(OSError, CheckpointError):
            names = {name.casefold(): name for name in _list_names(self.storage)}
        names.pop(typed, None)
        # Users often type only the beginning of a long name.
        name_by_start = {name[: len(typed)]: name for name in names}
        similar = [name for name in names if name.startswith(typed)]
        similar += difflib.get_close_matches(typed, names, n=_MAX_SUGGESTIONS, cutoff=0.5)
        similar += map(name_by_start.__getitem__, difflib.get_close_matches(typed, name_by_start))
        return [names[name] for name in dict.fromkeys(similar)][:_MAX_SUGGESTIONS]

    def describe_missing_run(self) -> str:
        """Return the message of an error for a run that does not exist."""
        text = f"There is no run {self.name!r} in {self.storage}."
        if similar := self.find_similar_names():
            return f"{text} Similar names: {', '.join(similar)}."
        names: list[str] = []
        with contextlib.suppress(OSError):
            names = [name for name in self.storage.list_directories() if name != self.name]
        others = f"has {len(names)} other directories" if names else "is empty or does not exist"
        return f"{text} This storage path {others}."


def can_be_run_name(text: str) -> bool:
    """Return whether a text can be the name of a run in the default storage path."""
    is_path = text.startswith(("/", "~", "./", "../")) or text in ("", ".", "..")
    return not is_path and ":/" not in text


def locate_run(
    path_or_name: str | os.PathLike[str], storage_filesystem: AnyFileSystem | None = None
) -> RunLocation:
    """Return the location of a run from its directory, URI, or name in the default storage path.

    A name without directories is looked up in the default storage path first, then in the working
    directory. A name with directories can also be a relative path, which comes first.

    Raises:
        ImportError, ValueError, TypeError: The path and the filesystem do not specify a storage.
    """
    text = os.fspath(path_or_name)
    if storage_filesystem is None and can_be_run_name(text):
        default = resolve_path(get_default_storage_path())
        if "/" in text:
            is_name = not os.path.exists(text) and (
                (default / text / JOURNAL_FILE).exists() or not Path(text).parent.is_dir()
            )
        else:
            is_name = not (Path(text) / JOURNAL_FILE).exists() or (default / text).exists()
        if is_name:
            return RunLocation(default, text)
    path = resolve_path(text, storage_filesystem)
    return RunLocation(path.parent, path.name)


def _list_names(storage: StoragePath, prefix: str = "", depth: int = 1) -> Iterator[str]:
    """Yield the names of runs at any depth; of all directories if the storage is remote."""
    for name in storage.list_directories():
        path = storage / name
        if not isinstance(path, LocalPath) or (path / JOURNAL_FILE).exists():
            yield prefix + name
        elif depth < MAX_DEPTH:
            with contextlib.suppress(OSError):
                yield from _list_names(path, f"{prefix}{name}/", depth + 1)
