"""A notebook for Ray Train as one for Drawbar: its cells are one script, outputs and all else stay.

What no Python is in a cell, such as `%pip install` or `!nvidia-smi`, is passed over.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from drawbar.cli._migrate.rewriter import MigrationNote, RewriteResult, parse_source, rewrite_lines

_MAGIC = re.compile(r"\s*(?:[%!?]|[\w.]+\?{1,2}\s*$|[\w., ]+=\s*[%!])")
_LINE = re.compile(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+")
_CELL_MAGIC = re.compile(r"%%(\w*)")
_PYTHON_CELL_MAGICS = ("time", "timeit", "capture", "prun")
_LAYOUTS: list[dict[str, Any]] = [
    {"indent": indent, "separators": separators, "ensure_ascii": escaped}
    for indent, separators, escaped in itertools.product(
        (1, 2, 4, "\t", None), ((",", ": "), (", ", ": "), (",", ":")), (False, True)
    )
]
"""How tools write notebooks; Jupyter's own is the first."""


@dataclass
class _Cell:
    """A cell with code: its lines, and the same with a `pass` for each that is no Python."""

    number: int
    lines: list[str]
    python: list[str]


def rewrite_notebook(text: str) -> RewriteResult:
    """Rewrite a notebook.

    Raises:
        ValueError: It is no notebook of Jupyter's format 4.
    """
    notebook = json.loads(text)
    try:
        language = _language(notebook["metadata"])
        sources = {
            number: "".join(each["source"])
            for number, each in enumerate(notebook["cells"], start=1)
            if each["cell_type"] == "code"
        }
    except (AttributeError, KeyError, TypeError):
        raise ValueError("it is no notebook of Jupyter's format 4") from None
    if "python" not in language.lower():
        return RewriteResult(text, [])
    cells, notes = list[_Cell](), list[MigrationNote]()
    for number, source in sources.items():
        cell, error = _read_cell(number, source)
        cells.append(cell)
        notes += [] if error is None else [error]
    changed, found = rewrite_lines("".join(line for cell in cells for line in cell.python))
    places = [(cell.number, line) for cell in cells for line in range(1, len(cell.lines) + 1)]
    for note in found:
        number, line = places[note.line - 1]
        notes.append(dataclasses.replace(note, line=line, cell=number))
    for cell, lines in _updated_sources(cells, changed):
        old = notebook["cells"][cell.number - 1]
        if lines != cell.lines:
            old["source"] = "".join(lines) if isinstance(old["source"], str) else lines
    notes.sort(key=lambda note: (note.cell or 0, note.line, note.text))
    return RewriteResult(_serialize(notebook, like=text), notes)


def _language(metadata: dict[str, Any]) -> str:
    told = metadata.get("language_info", {}).get("name")
    return str(told or metadata.get("kernelspec", {}).get("language") or "python")


def _read_cell(number: int, source: str) -> tuple[_Cell, MigrationNote | None]:
    lines = _LINE.findall(source)
    whole = [line if line[-1] in "\r\n" else f"{line}\n" for line in lines]
    error = _syntax_error(whole)
    python = whole if error is None else list(_replace_magics(whole))
    error = error and _syntax_error(python)  # of an empty cell there is none
    if error is None:
        return _Cell(number, lines, python), None
    line, why = (error.lineno, error.msg) if isinstance(error, SyntaxError) else (0, str(error))
    note = MigrationNote(line or 0, f"no Python: {why}", number)
    return _Cell(number, lines, ["pass\n"] * len(lines)), note


def _syntax_error(lines: list[str]) -> SyntaxError | ValueError | None:
    """Say why these lines are no Python of their own."""
    try:
        parse_source("".join(lines))
    except (SyntaxError, ValueError) as error:
        return error
    return None


def _replace_magics(lines: list[str]) -> Iterator[str]:
    """Give the lines of a cell with a `pass` for what IPython takes before Python sees it."""
    magic = _CELL_MAGIC.match(lines[0])
    is_other = magic is not None and magic[1] not in _PYTHON_CELL_MAGICS  # %%bash, say
    indent, is_continuation = "", False
    for line in lines:
        is_magic = is_other or is_continuation or _MAGIC.match(line) is not None
        if not is_other and not is_continuation:
            indent = line[: len(line) - len(line.lstrip())]
        is_continuation = is_magic and line.endswith("\\\n")
        yield f"{indent}pass\n" if is_magic else line


def _updated_sources(cells: list[_Cell], changed: list[str]) -> Iterator[tuple[_Cell, list[str]]]:
    """Give each cell with its lines as they are to be."""
    rest = iter(changed)
    for cell in cells:
        source = list[str]()
        for old, python in zip(cell.lines, cell.python, strict=True):
            new = next(rest)
            source += [old] if new == python else _LINE.findall(new)
        if source and cell.lines[-1][-1] not in "\r\n":
            source[-1] = source[-1].removesuffix("\n")
        yield cell, source


def _serialize(notebook: dict[str, Any], *, like: str) -> str:
    """Write a notebook as it was written before, so that a diff has what has changed alone."""
    before, end = json.loads(like), like[len(like.rstrip()) :]
    for layout in _LAYOUTS:
        if json.dumps(before, **layout) + end == like:
            return json.dumps(notebook, **layout) + end
    return json.dumps(notebook, indent=1) + end
