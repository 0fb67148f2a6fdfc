"""`drawbar migrate`: scripts for Ray Train become scripts for Drawbar."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from drawbar.cli._arguments import AsJson
from drawbar.cli._output import CommandError, write_json
from drawbar.cli._rewrite import Note, Rewritten, rewrite


def migrate(
    paths: Annotated[list[Path], typer.Argument(metavar="PATH", help="Scripts, or folders.")],
    write: Annotated[
        bool, typer.Option("--write/--diff", help="Change the files, or show what would change.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite Ray Train's imports and names.

    What cannot be decided is listed, with its line in the script as it was.
    """
    told = []
    for path in _scripts(paths):
        before = _read(path)
        try:
            after = rewrite(before)
        except SyntaxError as error:
            after = Rewritten(before, [Note(error.lineno or 0, f"no Python: {error.msg}")])
        diff = _diff(path, before, after.text)
        if write and after.text != before:
            _write(path, after.text)
        told.append({"path": str(path), "diff": diff, "notes": after.notes})
        if not as_json:
            print(f"{path}: rewritten\n" * bool(write and diff) if write else diff, end="")
            for note in after.notes:
                print(f"{path}:{note.line}: {note.text}")
    if as_json:
        write_json(told)
    elif not any(each["diff"] or each["notes"] for each in told):
        print("nothing to change")


def _scripts(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from sorted(path.rglob("*.py"))
        elif path.exists():
            yield path
        else:
            raise CommandError(f"{path} is not there")


def _read(path: Path) -> str:
    try:
        return path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        raise CommandError(f"{path}: {error}") from error


def _write(path: Path, text: str) -> None:
    try:
        path.write_bytes(text.encode())
    except OSError as error:
        raise CommandError(f"{path}: {error}") from error


def _diff(path: Path, before: str, after: str) -> str:
    lines = before.splitlines(keepends=True), after.splitlines(keepends=True)
    return "".join(difflib.unified_diff(*lines, str(path), str(path)))
