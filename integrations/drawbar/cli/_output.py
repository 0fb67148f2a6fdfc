"""What commands write: results to stdout, for people or as JSON, and one line if they cannot."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_MAX_METRICS = 4
_HIDDEN = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


class CommandError(Exception):
    """What was asked for is not there, or cannot be done: one line on stderr, exit code 2."""


def told_of(error: OSError) -> str:
    """Say what was refused, without the number of the error."""
    if error.filename is None or not error.strerror:
        return error.strerror or str(error)
    return f"{os.fspath(error.filename)}: {error.strerror}"


def write_json(value: Any) -> None:
    """Write plain data, or structs and dataclasses of it, to stdout as indented JSON.

    What is no number, NaN and the infinities, is null, as in any JSON. Bytes of a name that are not
    UTF-8 are written as in "\\xff".
    """
    try:
        encoded = msgspec.json.encode(value, enc_hook=str)
    except UnicodeEncodeError:  # a name that is not UTF-8
        encoded = msgspec.json.encode(_as_text(msgspec.to_builtins(value, enc_hook=str)))
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")


def _as_text(value: Any) -> Any:
    """Give plain data with strings that JSON can hold."""
    match value:
        case str():
            return re.sub("[\ud800-\udfff]", _escaped, value)
        case dict():
            return {_as_text(key): _as_text(each) for key, each in value.items()}
        case list() | tuple():
            return [_as_text(each) for each in value]
    return value


def visible(text: str) -> str:
    """Give a text in one line that steers no terminal: control characters are escaped."""
    return _HIDDEN.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    code = ord(found[0])
    if 0xDC80 <= code <= 0xDCFF:  # a byte that is not UTF-8, as Python has it in names
        code -= 0xDC00
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def write_table(rows: Sequence[Sequence[str]], indent: str = "") -> None:
    """Write rows with their columns below each other."""
    rows = [[visible(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        print(indent + "  ".join(cells).rstrip())


def span(seconds: float | None) -> str:
    """Give a duration as people read it, such as "2.1 s", "12 min" or "3 d"."""
    if seconds is None:
        return "-"
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            amount = seconds / unit
            return f"{amount:.2g} {name}" if amount < 10 else f"{amount:.0f} {name}"
    return f"{seconds / 86_400:.0f} d"


def ago(moment: float | None) -> str:
    """Say how long ago something was, by its seconds since the epoch."""
    return "-" if moment is None else f"{span(max(0.0, time.time() - moment))} ago"


def number(value: object) -> str:
    """Give a value in few characters."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def flat(nested: Mapping[str, object], prefix: str = "") -> dict[str, Any]:
    """Join nested keys with "/", as in a run's table of reports."""
    joined: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping) and value:
            joined |= flat(value, f"{prefix}{key}/")
        else:
            joined[f"{prefix}{key}"] = value
    return joined


def one_line(value: object) -> str:
    """Give a setting in one line."""
    return " ".join(str(value).split())


def shown_metrics(metrics: Mapping[str, object] | None) -> str:
    """Give the first few metrics in one line."""
    shown = [f"{key} {number(value)[:16]}" for key, value in flat(metrics or {}).items()]
    return ", ".join(shown[:_MAX_METRICS]) + (", ..." if len(shown) > _MAX_METRICS else "")
