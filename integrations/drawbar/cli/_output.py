"""What commands write: results to stdout, for people or as JSON, and one line if they cannot."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Mapping, Sequence

import msgspec
from rich.cells import cell_len, set_cell_size

_MAX_METRICS = 4
_GAP = "  "
_CUT = "..."
_LEAST_WIDTH, _LEAST_LAST = 6, 12
_DAY = 86_400.0
_MAX_DURATION_S = 1e10  # seconds: some centuries
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class CommandError(Exception):
    """What was asked for is not there, or cannot be done: one line on stderr, exit code 2."""


def format_os_error(error: OSError) -> str:
    """Say what was refused, without the number of the error."""
    if error.filename is None or not error.strerror:
        return error.strerror or str(error)
    return f"{os.fspath(error.filename)}: {error.strerror}"


def write_json(value: object) -> None:
    """Write plain data, or structs and dataclasses of it, to stdout as indented JSON.

    What is no number, NaN and the infinities, is null, as in any JSON. Bytes of a name that are not
    UTF-8 are written as in "\\xff".
    """
    try:
        encoded = msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:  # a name that is not UTF-8
        encoded = msgspec.json.encode(_as_text(msgspec.to_builtins(value, enc_hook=str)))
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")


def _as_text(value: object) -> object:
    """Give plain data with strings that JSON can hold."""
    match value:
        case str():
            return re.sub("[\ud800-\udfff]", _escaped, value)
        case dict():
            return {_as_text(key): _as_text(each) for key, each in value.items()}
        case list() | tuple():
            return [_as_text(each) for each in value]
    return value


def escape_control_chars(text: str) -> str:
    """Give a text in one line that steers no terminal: control characters are escaped."""
    return _HIDDEN.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8, as Python has it in names
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def escape_lines(text: str) -> str:
    """Do the same with each line of a text."""
    return "\n".join(map(escape_control_chars, text.split("\n")))


def terminal_width() -> int:
    """Give the width of the terminal, or COLUMNS; 0 if neither is there, as in a pipe."""
    return shutil.get_terminal_size((0, 0)).columns


def write_table(
    rows: Sequence[Sequence[str]], indent: str = "", *, keep_last_column: bool = False
) -> None:
    """Write rows with their columns below each other, cut to the width of the terminal.

    Args:
        rows: Of equal lengths.
        indent: Stands before each.
        whole: The last column is not cut: it has what people copy, such as paths.
    """
    rows = [[escape_control_chars(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    if widths and (room := terminal_width()):
        room -= len(indent) + len(_GAP) * (len(widths) - 1)
        if keep_last_column:
            others = _fit_widths(widths[:-1], room - widths[-1])
            # A line that is longer than the terminal anyhow loses nothing more.
            widths = [*others, widths[-1]] if sum(others) + widths[-1] <= room else widths
        else:
            widths = _fit_widths(widths, room)
    for row in rows:
        cells = (_fit_cell(cell, width) for cell, width in zip(row, widths, strict=True))
        print(indent + _GAP.join(cells).rstrip())


def _fit_widths(widths: list[int], room: int) -> list[int]:
    """Make the last column narrower, then the widest ones, until all fit or none can be read."""
    *others, last = widths
    surplus = max(0, sum(widths) - room)
    widths = [*others, max(last - surplus, min(last, _LEAST_LAST))]
    most = max(widths)
    while most > _LEAST_WIDTH and sum(min(width, most) for width in widths) > room:
        most -= 1
    return [min(width, most) for width in widths]


def _fit_cell(cell: str, width: int) -> str:
    """Give a cell in so many columns of a terminal, where a sign may take two."""
    if cell_len(cell) <= width:
        return set_cell_size(cell, width)
    return set_cell_size(cell, width - len(_CUT)) + _CUT


def format_duration(seconds: float | None) -> str:
    """Give a duration as people read it, such as "2.1 s", "12 min" or "3 d"."""
    if seconds is None:
        return "-"
    if abs(seconds) > _MAX_DURATION_S:
        return "unknown"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            amount = seconds / unit
            return f"{amount:.2g} {name}" if amount < 10 else f"{amount:.0f} {name}"
    return f"{seconds / 86_400:.0f} d"


def plausible_time(moment: float | None) -> float | None:
    """Give a time, in seconds since the epoch, that a clock may have told; None if none may have.

    Another machine's clock may be ahead, by a day at the most.
    """
    return moment if moment is not None and 0 <= moment <= time.time() + _DAY else None


def format_age(moment: float | None) -> str:
    """Say how long ago something was, by its seconds since the epoch."""
    if moment is None:
        return "-"
    at = plausible_time(moment)
    return "unknown" if at is None else f"{format_duration(max(0.0, time.time() - at))} ago"


def format_value(value: object) -> str:
    """Give a value in few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def flatten(nested: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Join nested keys with "/", as in a run's table of reports."""
    joined: dict[str, object] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            joined |= flatten(value, f"{prefix}{key}/")
        else:
            joined[f"{prefix}{key}"] = value
    return joined


def one_line(value: object) -> str:
    """Give a setting in one line."""
    return " ".join(str(value).split())


def format_metrics(metrics: Mapping[str, object] | None) -> str:
    """Give the first few metrics in one line."""
    shown = [f"{key} {format_value(value)[:16]}" for key, value in flatten(metrics or {}).items()]
    return ", ".join(shown[:_MAX_METRICS]) + (", ..." if len(shown) > _MAX_METRICS else "")
