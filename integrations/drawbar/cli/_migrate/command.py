"""`drawbar migrate`: scripts and notebooks for Ray Train become those for Drawbar."""

from __future__ import annotations

import difflib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from drawbar.cli._arguments import AsJson
from drawbar.cli._migrate.notebook import rewrite_notebook
from drawbar.cli._migrate.rewriter import MigrationNote, RewriteResult, rewrite
from drawbar.cli._output import CommandError, escape_control_chars, format_os_error, write_json

_SKIPPED_DIRECTORIES = ("__pycache__", "node_modules", "site-packages")

_NO_END = "\n\\ No newline at end of file\n"


def migrate(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH", help="Scripts, notebooks, or folders.")
    ],
    write: Annotated[
        bool, typer.Option("--write/--diff", help="Change the files, or show what would change.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite Ray Train's imports and names.

    What cannot be decided is listed, with its line in the script as it was. In folders, hidden
    ones, environments with packages, and links are passed over.
    """
    results = []
    for path in _scripts(paths):
        before, after = _try_rewrite(path)
        diff = _diff(path, before, after.text)
        if write and diff:
            _replace_file(path, after.text)
        results.append({"path": str(path), "diff": diff, "notes": after.notes})
        if not as_json:
            name = escape_control_chars(str(path))
            print(f"{name}: rewritten\n" * bool(write and diff) if write else diff, end="")
            for note in after.notes:
                cell = "" if note.cell is None else f"cell {note.cell}:"
                print(f"{name}:{cell}{note.line}: {escape_control_chars(note.text)}")
    if as_json:
        write_json(results)
    elif not any(each["diff"] or each["notes"] for each in results):
        print("nothing to change")


def _scripts(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from _iter_scripts(path)
        elif path.exists():
            yield path
        else:
            raise CommandError(f"{path} is not there")


def _iter_scripts(folder: Path) -> Iterator[Path]:
    """Give the scripts and notebooks of a project's own."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(each for each in folders if _is_project_directory(Path(place, each)))
        own = (Path(place, name) for name in sorted(files) if name.endswith((".py", ".ipynb")))
        yield from (path for path in own if path.is_file() and not path.is_symlink())


def _is_project_directory(folder: Path) -> bool:
    is_environment = folder.name in _SKIPPED_DIRECTORIES or (folder / "pyvenv.cfg").exists()
    return not (is_environment or folder.name.startswith("."))


def _try_rewrite(path: Path) -> tuple[str, RewriteResult]:
    """Give a script as it is, and rewritten; if it cannot be, why not."""
    before = ""
    try:
        before = path.read_bytes().decode()
        return before, (rewrite_notebook if path.suffix == ".ipynb" else rewrite)(before)
    except OSError as error:
        line, why = 0, format_os_error(error)
    except SyntaxError as error:
        line, why = error.lineno or 0, f"no Python: {error.msg}"
    except (ValueError, RecursionError) as error:  # no UTF-8, no JSON, a NUL
        line, why = 0, f"it cannot be rewritten: {error}"
    return before, RewriteResult(before, [MigrationNote(line, why)])


def _replace_file(path: Path, text: str) -> None:
    """Put a file in the place of another: whatever happens, one of them is there."""
    target = path.resolve()
    draft = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        draft.write_bytes(text.encode())
        shutil.copymode(target, draft)
        os.replace(draft, target)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise CommandError(format_os_error(error)) from error


def _diff(path: Path, before: str, after: str) -> str:
    lines = list(io.StringIO(before)), list(io.StringIO(after))
    results = difflib.unified_diff(*lines, str(path), str(path))
    return "".join(line if line.endswith("\n") else f"{line}{_NO_END}" for line in results)
