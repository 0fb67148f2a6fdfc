"""Directories of small text files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drawbar.train._storage.contents import METADATA_FILE, list_files


def write(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


def content(path: Any) -> dict[str, str]:
    files = [file.path for file in list_files(Path(path)) if file.path != METADATA_FILE]
    return {file: (Path(path) / file).read_text(errors="replace") for file in files}
