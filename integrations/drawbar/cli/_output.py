"""Print tables, JSON, and values."""

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
_MIN_WIDTH, _MIN_LAST_WIDTH = 6, 12
_DAY = 86_400.0
_MAX_DURATION_S = 1e10  # about 300 years
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class CommandError(Exception):
    """Error of a command, printed to stderr in one line. The exit code is 2."""


def format_os_error(error: OSError) -> str:
    """Return the file name and the reason of an OSError, without its number."""
    if error.filename is None or not error.strerror:
        return error.strerror or str(error)
    return f"{os.fspath(error.filename)}: {error.strerror}"


def write_json(value: object) -> None:
    """Print plain data, structs, or dataclasses as indented JSON. See `encode_json`."""
    sys.stdout.write(encode_json(value).decode())


def encode_json(value: object) -> bytes:
    """Encode plain data, structs, or dataclasses as indented JSON.

    NaN and infinities become null. Bytes of names that are not UTF-8 are escaped as in Python.
    """
    try:
        encoded = msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:  # a name that is not UTF-8
        encoded = msgspec.json.encode(_as_text(msgspec.to_builtins(value, enc_hook=str)))
    return msgspec.json.format(encoded, indent=2) + b"\n"


def _as_text(value: object) -> object:
    """Escape characters in strings that UTF-8 cannot encode."""
    match value:
        case str():
            return re.sub("[\ud800-\udfff]", _escape, value)
        case dict():
            return {_as_text(key): _as_text(item) for key, item in value.items()}
        case list() | tuple():
            return [_as_text(item) for item in value]
    return value


def escape_control_chars(text: str) -> str:
    """Escape control characters and line ends, so that a text is one line without side effects."""
    return _HIDDEN.sub(_escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    if 0xDC80 <= code <= 0xDCFF:  # surrogate escape of a byte that is not UTF-8
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def escape_lines(text: str) -> str:
    """Escape control characters in each line of a text."""
    return "\n".join(map(escape_control_chars, text.split("\n")))


def terminal_width() -> int:
    """Return the width of the terminal, or COLUMNS; 0 if the output is not a terminal."""
    return shutil.get_terminal_size((0, 0)).columns


def write_table(
    rows: Sequence[Sequence[str]], indent: str = "", *, keep_last_column: bool = False
) -> None:
    """Print rows with aligned columns, truncated to the width of the terminal.

    Args:
        rows: Cells of each row. All rows have the same length.
        indent: Text before each row.
        keep_last_column: Do not truncate the last column, for example paths that users copy.
    """
    rows = [[escape_control_chars(cell) for cell in row] for row in rows]
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    if widths and (room := terminal_width()):
        room -= len(indent) + len(_GAP) * (len(widths) - 1)
        if keep_last_column:
            others = _fit_widths(widths[:-1], room - widths[-1])
            # If the row does not fit in any case, truncating the other columns would not help.
            widths = [*others, widths[-1]] if sum(others) + widths[-1] <= room else widths
        else:
            widths = _fit_widths(widths, room)
    for row in rows:
        cells = (_fit_cell(cell, width) for cell, width in zip(row, widths, strict=True))
        print(indent + _GAP.join(cells).rstrip())


def _fit_widths(widths: list[int], room: int) -> list[int]:
    """Shrink the last column, then the widest ones, until all fit or reach the minimum width."""
    *others, last = widths
    surplus = max(0, sum(widths) - room)
    widths = [*others, max(last - surplus, min(last, _MIN_LAST_WIDTH))]
    most = max(widths)
    while most > _MIN_WIDTH and sum(min(width, most) for width in widths) > room:
        most -= 1
    return [min(width, most) for width in widths]


def _fit_cell(cell: str, width: int) -> str:
    """Pad or truncate a cell to a width in terminal columns. A character may take two."""
    if cell_len(cell) <= width:
        return set_cell_size(cell, width)
    return set_cell_size(cell, width - len(_CUT)) + _CUT


def format_duration(seconds: float | None) -> str:
    """Format a duration, for example "2.1 s", "12 min", or "3 d"."""
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
    """Return a time in seconds since the epoch, or None if it is implausible.

    Clocks of other machines may be up to one day ahead.
    """
    return moment if moment is not None and 0 <= moment <= time.time() + _DAY else None


def format_age(moment: float | None) -> str:
    """Format the age of a time in seconds since the epoch, for example "5 min ago"."""
    if moment is None:
        return "-"
    at = plausible_time(moment)
    return "unknown" if at is None else f"{format_duration(max(0.0, time.time() - at))} ago"


def format_value(value: object) -> str:
    """Format a value. Floats get four significant digits."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def flatten(nested: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Join nested keys with "/", as in the table of a run's reports."""
    joined: dict[str, object] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            joined |= flatten(value, f"{prefix}{key}/")
        else:
            joined[f"{prefix}{key}"] = value
    return joined


def one_line(value: object) -> str:
    """Format a setting in one line."""
    return " ".join(str(value).split())


def format_metrics(metrics: Mapping[str, object] | None) -> str:
    """Format the first metrics in one line."""
    shown = [f"{key} {format_value(value)[:16]}" for key, value in flatten(metrics or {}).items()]
    return ", ".join(shown[:_MAX_METRICS]) + (", ..." if len(shown) > _MAX_METRICS else "")


def discard_output() -> None:
    """Redirect streams whose output cannot be written, so that the flush at exit cannot fail."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            devnull = os.open(os.devnull, os.O_WRONLY)
            os.dup2(devnull, stream.fileno())
            os.close(devnull)
