"""drawbar migrate: rewrite Ray Train imports and names."""

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
from drawbar.cli._migrate.checks import MigrationNote
from drawbar.cli._migrate.notebook import rewrite_notebook
from drawbar.cli._migrate.rewriter import RewriteResult, rewrite
from drawbar.cli._output import CommandError, escape_control_chars, format_os_error, write_json

_SKIPPED_DIRECTORIES = ("__pycache__", "node_modules", "site-packages")

_NO_NEWLINE_MARKER = "\n\\ No newline at end of file\n"


def migrate(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH", help="Scripts, notebooks, or directories.")
    ],
    write: Annotated[
        bool, typer.Option("--write/--diff", help="Change the files, or print a diff.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rewrite Ray Train imports and names for Drawbar.

    Prints a diff unless --write is given. Also lists code that you must check or change yourself,
    with line numbers of the original file. Skips hidden directories, virtual environments, and
    symbolic links.
    """
    results = []
    for path in _find_scripts(paths):
        before, after = _try_rewrite(path)
        diff = _make_diff(path, before, after.text)
        if write and diff:
            _replace_file(path, after.text)
        results.append({"path": str(path), "diff": diff, "notes": after.notes})
        if not as_json:
            name = escape_control_chars(str(path))
            if not write:
                print(diff, end="")
            elif diff:
                print(f"Rewrote {name}")
            for note in after.notes:
                cell = "" if note.cell is None else f"cell {note.cell}:"
                print(f"{name}:{cell}{note.line}: {escape_control_chars(note.text)}")
    if as_json:
        write_json(results)
    elif not any(result["diff"] or result["notes"] for result in results):
        print("No changes needed.")


def _find_scripts(paths: list[Path]) -> Iterator[Path]:
    for path in paths:
        if path.is_dir():
            yield from _find_scripts_in_directory(path)
        elif path.exists():
            yield path
        else:
            raise CommandError(f"No such file or directory: {path}")


def _find_scripts_in_directory(root: Path) -> Iterator[Path]:
    """Yield the scripts and notebooks of a project, without those of installed packages."""
    for directory, subdirectories, files in os.walk(root):
        subdirectories[:] = sorted(
            name for name in subdirectories if _is_project_directory(Path(directory, name))
        )
        paths = (
            Path(directory, name) for name in sorted(files) if name.endswith((".py", ".ipynb"))
        )
        yield from (path for path in paths if path.is_file() and not path.is_symlink())


def _is_project_directory(directory: Path) -> bool:
    is_virtual_environment = (directory / "pyvenv.cfg").exists()
    is_skipped = directory.name in _SKIPPED_DIRECTORIES or directory.name.startswith(".")
    return not (is_virtual_environment or is_skipped)


def _try_rewrite(path: Path) -> tuple[str, RewriteResult]:
    """Return the text of a script, and the result of rewriting it.

    If the script cannot be rewritten, the result has the same text and a note with the reason.
    """
    before = ""
    try:
        before = path.read_bytes().decode()
        return before, (rewrite_notebook if path.suffix == ".ipynb" else rewrite)(before)
    except OSError as error:
        line, reason = 0, format_os_error(error)
    except SyntaxError as error:
        line, reason = error.lineno or 0, f"invalid Python: {error.msg}"
    except (ValueError, RecursionError) as error:  # invalid UTF-8 or JSON, a NUL character
        line, reason = 0, f"cannot be rewritten: {error}"
    return before, RewriteResult(before, [MigrationNote(line, reason)])


def _replace_file(path: Path, text: str) -> None:
    """Replace a file atomically: after a crash, either the old or the new file exists."""
    target = path.resolve()
    temp_path = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temp_path.write_bytes(text.encode())
        shutil.copymode(target, temp_path)
        os.replace(temp_path, target)
    except OSError as error:
        temp_path.unlink(missing_ok=True)
        raise CommandError(format_os_error(error)) from error


def _make_diff(path: Path, before: str, after: str) -> str:
    old_lines, new_lines = list(io.StringIO(before)), list(io.StringIO(after))
    diff_lines = difflib.unified_diff(old_lines, new_lines, str(path), str(path))
    return "".join(
        line if line.endswith("\n") else f"{line}{_NO_NEWLINE_MARKER}" for line in diff_lines
    )
