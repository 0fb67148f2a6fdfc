"""Rewrite the code cells of a Jupyter notebook.

All cells are treated as one script. Outputs, other cells, and lines that are not Python, such as
`%pip install` or `!nvidia-smi`, do not change.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from drawbar.cli._migrate.checks import MigrationNote
from drawbar.cli._migrate.rewriter import RewriteResult, parse_source, rewrite_lines

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
"""JSON layouts that tools use for notebooks. Jupyter's layout comes first."""


@dataclass
class _Cell:
    """A code cell: its lines, and the same lines with `pass` in place of those not in Python."""

    number: int
    lines: list[str]
    python: list[str]


def rewrite_notebook(text: str) -> RewriteResult:
    """Rewrite a notebook.

    Raises:
        ValueError: The text is not a Jupyter notebook in format 4.
    """
    notebook = json.loads(text)
    try:
        language = _language(notebook["metadata"])
        sources = {
            number: "".join(cell["source"])
            for number, cell in enumerate(notebook["cells"], start=1)
            if cell["cell_type"] == "code"
        }
    except (AttributeError, KeyError, TypeError):
        raise ValueError("not a Jupyter notebook (format 4)") from None
    if "python" not in language.lower():
        return RewriteResult(text, [])
    cells, notes = list[_Cell](), list[MigrationNote]()
    for number, source in sources.items():
        cell, error = _read_cell(number, source)
        cells.append(cell)
        notes += [] if error is None else [error]
    changed, script_notes = rewrite_lines("".join(line for cell in cells for line in cell.python))
    positions = [(cell.number, line) for cell in cells for line in range(1, len(cell.lines) + 1)]
    for note in script_notes:
        number, line = positions[note.line - 1]
        notes.append(dataclasses.replace(note, line=line, cell=number))
    for cell, lines in _updated_sources(cells, changed):
        old = notebook["cells"][cell.number - 1]
        if lines != cell.lines:
            old["source"] = "".join(lines) if isinstance(old["source"], str) else lines
    notes.sort(key=lambda note: (note.cell or 0, note.line, note.text))
    return RewriteResult(_serialize(notebook, like=text), notes)


def _language(metadata: dict[str, Any]) -> str:
    name = metadata.get("language_info", {}).get("name")
    return str(name or metadata.get("kernelspec", {}).get("language") or "python")


def _read_cell(number: int, source: str) -> tuple[_Cell, MigrationNote | None]:
    lines = _LINE.findall(source)
    complete = [line if line[-1] in "\r\n" else f"{line}\n" for line in lines]
    error = _syntax_error(complete)
    python = complete if error is None else list(_replace_magics(complete))
    error = error and _syntax_error(python)  # an empty cell has no error
    if error is None:
        return _Cell(number, lines, python), None
    line, reason = (error.lineno, error.msg) if isinstance(error, SyntaxError) else (0, str(error))
    note = MigrationNote(line or 0, f"invalid Python: {reason}", number)
    return _Cell(number, lines, ["pass\n"] * len(lines)), note


def _syntax_error(lines: list[str]) -> SyntaxError | ValueError | None:
    """Return the error of parsing these lines as Python, or None."""
    try:
        parse_source("".join(lines))
    except (SyntaxError, ValueError) as error:
        return error
    return None


def _replace_magics(lines: list[str]) -> Iterator[str]:
    """Yield the lines of a cell with `pass` in place of IPython magics and shell commands."""
    magic = _CELL_MAGIC.match(lines[0])
    is_other = magic is not None and magic[1] not in _PYTHON_CELL_MAGICS  # for example %%bash
    indent, is_continuation = "", False
    for line in lines:
        is_magic = is_other or is_continuation or _MAGIC.match(line) is not None
        if not is_other and not is_continuation:
            indent = line[: len(line) - len(line.lstrip())]
        is_continuation = is_magic and line.endswith("\\\n")
        yield f"{indent}pass\n" if is_magic else line


def _updated_sources(cells: list[_Cell], changed: list[str]) -> Iterator[tuple[_Cell, list[str]]]:
    """Yield each cell with its rewritten lines."""
    remaining = iter(changed)
    for cell in cells:
        source = list[str]()
        for old, python in zip(cell.lines, cell.python, strict=True):
            new = next(remaining)
            source += [old] if new == python else _LINE.findall(new)
        if source and cell.lines[-1][-1] not in "\r\n":
            source[-1] = source[-1].removesuffix("\n")
        yield cell, source


def _serialize(notebook: dict[str, Any], *, like: str) -> str:
    """Serialize a notebook in the layout of the original text, so that the diff is minimal."""
    before, end = json.loads(like), like[len(like.rstrip()) :]
    for layout in _LAYOUTS:
        if json.dumps(before, **layout) + end == like:
            return json.dumps(notebook, **layout) + end
    return json.dumps(notebook, indent=1) + end
