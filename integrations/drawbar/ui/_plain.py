"""Convert data of a run to JSON that browsers can parse."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

_MAX_DEPTH = 20
_MAX_TEXT = 100_000
_MAX_SAFE_INTEGER = 2**53


def encode_json(value: object) -> bytes:
    """Encode a value as ASCII JSON. Non-finite numbers become strings, unknown types their repr."""
    return json.dumps(_simplify(value, 0), allow_nan=False, separators=(",", ":")).encode()


def encode_json_for_html(value: object) -> str:
    """Encode a value as JSON for a script element: no character can end the element."""
    text = encode_json(value).decode()
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _simplify(value: object, depth: int) -> object:
    match value:
        case None | bool():
            return value
        case str():
            return value[:_MAX_TEXT]
        case int():
            return int(value) if abs(value) <= _MAX_SAFE_INTEGER else str(value)
        case float():
            return float(value) if math.isfinite(value) else _name_non_finite(value)
        case _ if depth > _MAX_DEPTH:
            return "..."
        case Mapping():
            return {str(key): _simplify(item, depth + 1) for key, item in value.items()}
        case list() | tuple() | set() | frozenset():
            return [_simplify(item, depth + 1) for item in value]
        case _:
            return str(value)[:_MAX_TEXT]


def _name_non_finite(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    return "Infinity" if value > 0 else "-Infinity"


def flatten_settings(values: Mapping[str, Any], limit: int = 1_000) -> dict[str, Any]:
    """Return nested values with keys joined by "/", at most `limit` of them."""
    flat: dict[str, Any] = {}
    for name, value in _iter_leaves(values, "", 0):
        if len(flat) == limit:
            break
        flat[name] = value
    return flat


def _iter_leaves(values: Mapping[str, Any], prefix: str, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and depth < _MAX_DEPTH:
            yield from _iter_leaves(value, f"{name}/", depth + 1)
        else:
            yield name, value


def as_number(value: object) -> float | None:
    """Return a finite number as a float, and None for everything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None
