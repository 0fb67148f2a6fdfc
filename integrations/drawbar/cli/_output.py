"""What commands write: results to stdout, for people or as JSON, and one line if they cannot."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

_MAX_METRICS = 4


class CommandError(Exception):
    """What was asked for is not there, or cannot be done: one line on stderr, exit code 2."""


def told_of(error: OSError) -> str:
    """Say what was refused, without the number of the error."""
    if error.filename is None or not error.strerror:
        return error.strerror or str(error)
    return f"{os.fspath(error.filename)}: {error.strerror}"


def write_json(value: Any) -> None:
    """Write plain data, or structs and dataclasses of it, to stdout as indented JSON.

    What is no number, NaN and the infinities, is null, as in any JSON.
    """
    encoded = msgspec.json.encode(value, enc_hook=str)
    sys.stdout.write(msgspec.json.format(encoded, indent=2).decode() + "\n")


def write_table(rows: Sequence[Sequence[str]], indent: str = "") -> None:
    """Write rows with their columns below each other."""
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
