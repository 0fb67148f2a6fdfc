"""Write a file that the user named, without damage to a run or to a special file."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path

_JOURNAL_FILE = "journal.jsonl"


def check_output(path: Path) -> None:
    """Check that a file is not one of a run's files.

    The only files that users may write in a run directory are HTML files next to its journal.

    Raises:
        ValueError: The file, or the file that a symbolic link refers to, belongs to a run.
    """
    target = Path(os.path.realpath(path))
    run = next((each for each in target.parents if os.path.lexists(each / _JOURNAL_FILE)), None)
    if run is None or (target.parent == run and target.suffix.lower() in (".html", ".htm")):
        return
    raise ValueError(
        f"The output {path} is {target}, which is in the directory of the run {run}. "
        f"Set a path outside it, or {run / 'page.html'}."
    )


def write_output(path: Path, text: str) -> None:
    """Replace a file when its new text is complete. Symbolic links are followed.

    A target that is not a regular file, such as a pipe or a device, is written directly.

    Raises:
        OSError: The file cannot be written.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        path.write_text(text, encoding="utf-8")
        return
    target = Path(os.path.realpath(path))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        with temporary.open("x", encoding="utf-8") as file:  # the umask sets the mode
            file.write(text)
        if mode is not None:
            temporary.chmod(stat.S_IMODE(mode))
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
