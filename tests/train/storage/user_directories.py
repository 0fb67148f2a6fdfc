"""Directories of small text files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

ADDED_FILES = {
    ".drawbar.json",
    ".drawbar-checksums.json",
    ".drawbar-validation.json",
    ".metadata.json",
}
"""Files that Drawbar adds to a checkpoint."""


def write(directory: Path, **files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (directory / name).write_text(text)
    return directory


def content(path: Any) -> dict[str, str]:
    """Return the text of each file of the user, also of those below links to directories."""
    files = {
        str(Path(parent, name).relative_to(path)): Path(parent, name).read_text(errors="replace")
        for parent, _, names in os.walk(path, followlinks=True)
        for name in names
    }
    return {name: text for name, text in files.items() if name not in ADDED_FILES}
