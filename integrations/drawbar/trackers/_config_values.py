"""Configuration of a run as flat values for trackers."""

from __future__ import annotations

from collections.abc import Mapping


def flatten_config(config: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Join nested keys with "/". Empty values are left out."""
    values: dict[str, object] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            values.update(flatten_config(value, f"{prefix}{key}/"))
        elif value is not None and value not in ("", [], ()):
            values[f"{prefix}{key}"] = value
    return values
