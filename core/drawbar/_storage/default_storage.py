"""The storage path of runs that do not set `RunConfig.storage_path`."""

from __future__ import annotations

import os
from pathlib import Path

from drawbar._base.api import suggest_name

_VARIABLE = "DRAWBAR_STORAGE"
_KEY = "storage_path"

# The home directory survives a reboot, and the nodes of a cluster often share it.
_DEFAULT = "~/drawbar_results"


def get_default_storage_path() -> str:
    """Return the path or URI in which runs are stored if `RunConfig.storage_path` is not set.

    It is, in this order: the environment variable DRAWBAR_STORAGE, `storage_path` in the
    configuration file, or `~/drawbar_results`. The configuration file is
    `$XDG_CONFIG_HOME/drawbar/config.toml`, by default below `~/.config`.

    Returns:
        An absolute path, a path that begins with `~`, or a URI.

    Raises:
        ValueError: The variable or the file has an invalid value.
        OSError: The file cannot be read.

    Example:
        List the runs in the default storage path:

            print([run.name for run in runs.list_runs(runs.get_default_storage_path())])
    """
    if value := os.environ.get(_VARIABLE):
        return _check_path(f"environment variable {_VARIABLE}", value)
    return _read_config_file() or _DEFAULT


def _read_config_file() -> str | None:
    """Return the storage path in the configuration file; None if there is none."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config", "drawbar", "config.toml")
    file = config.expanduser()
    try:
        data = file.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    import tomllib  # here, because most machines do not have the file

    try:
        values = tomllib.loads(data.decode())
    except ValueError as error:
        raise ValueError(f"{file} is not a valid TOML file: {error}") from None
    for name in values.keys() - {_KEY}:
        raise ValueError(f"{file} has an unknown setting {name!r}: {suggest_name(name, [_KEY])}")
    return _check_path(f"{_KEY} in {file}", values[_KEY]) if _KEY in values else None


def _check_path(source: str, value: object) -> str:
    """Return the path. A relative one would be another directory for each command."""
    is_absolute = isinstance(value, str) and (value.startswith(("/", "~")) or "://" in value)
    if not isinstance(value, str) or not is_absolute:
        raise ValueError(f"The {source} must be an absolute path or a URI, found {value!r}.")
    return value
