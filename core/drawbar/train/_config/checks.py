"""Shared checks and repr of the config classes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import re
import sys
import warnings
from collections.abc import Sequence, Set
from datetime import timedelta
from pathlib import PurePath
from typing import TYPE_CHECKING, TypeVar

from drawbar.train._config.argument_errors import ArgumentErrors
from drawbar.train._config.secrets import redact_text
from drawbar.train._package_files import is_drawbar_frame

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")

_MAX_DURATION_S = timedelta.max.total_seconds()
_MAX_NAME_BYTES = 255  # bytes, in all usual file systems


class ConfigRepr(ArgumentErrors):
    """A repr of the fields that differ from their defaults: one short line in a notebook."""

    def __repr__(self) -> str:
        shown = []
        for item in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            default = item.default
            if item.default_factory is not dataclasses.MISSING:
                default = item.default_factory()
            value = getattr(self, item.name)
            if value != default:
                shown.append(f"{item.name}={value!r}")
        return f"{type(self).__name__}({', '.join(shown)})"


def warn_caller(message: str) -> None:
    """Issue a warning at the innermost line outside Drawbar and its integrations."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and is_drawbar_frame(frame):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


def check_run_name(name: str) -> None:
    """Check that a run name is a relative path of valid directory names.

    Raises:
        TypeError: The name is not a string.
        ValueError: The name is not a valid directory name or leaves the storage path.
    """
    require_type("RunConfig.name", name, str)
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(
            f"RunConfig.name={name!r} would leave the storage path; "
            "give a plain name, and set the directory with storage_path="
        )
    if not name.strip() or name in (".", "./") or re.search(r"[\x00-\x1f]", name):
        raise ValueError(f"RunConfig.name={name!r} is not a valid directory name")
    if (length := max(len(os.fsencode(part)) for part in path.parts)) > _MAX_NAME_BYTES:
        raise ValueError(
            f"RunConfig.name={name[:20] + '...'!r} has {length} bytes; a directory name has at "
            f"most {_MAX_NAME_BYTES}"
        )


def require_type(name: str, value: object, expected_type: type | tuple[type, ...]) -> None:
    """Raise a TypeError that names the setting unless the value is an instance of a type."""
    if not isinstance(value, expected_type):
        types = expected_type if isinstance(expected_type, tuple) else (expected_type,)
        expected = " or ".join(t.__name__ for t in types)
        raise TypeError(f"{name} must be {expected}, found {value!r} ({type(value).__name__})")


def is_list_of(expected_type: type, value: object) -> bool:
    """Return whether a value is a sequence or set (not a string) of instances of a type."""
    if not isinstance(value, Sequence | Set) or isinstance(value, str):
        return False
    return all(isinstance(item, expected_type) for item in value)


def resolve_config(name: str, value: T | None, kind: type[T]) -> T:
    """Return the config passed as an argument, or a default config.

    Args:
        name: Name of the argument, for the message.
        value: The argument; None selects the default config.
        kind: Expected config class.

    Returns:
        `value`, or a default instance of `kind`.

    Raises:
        TypeError: `value` is an instance of another class.

    Example:
        torch_config = resolve_config("torch_config", torch_config, TorchConfig)
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOX" else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}, found {value!r}")
    return value


def require_int(name: str, value: object, *, at_least: int) -> None:
    """Check that a value is an int and not below a minimum.

    Raises:
        TypeError: The value is not an int.
        ValueError: The value is below `at_least`.
    """
    # bool is a subclass of int, but `num_workers=True` is a mistake.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, found {value!r} ({type(value).__name__})")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, found {value}")


def parse_duration(
    name: str, value: object, *, none_meaning: str = "", can_be_zero: bool = False
) -> float:
    """Convert a duration in seconds or as a timedelta to seconds.

    Args:
        name: Name of the setting or argument, such as "TorchConfig.timeout_s".
        value: Number of seconds or timedelta.
        none_meaning: Effect of None, for the message, if the setting can be None. The caller
            handles None.
        can_be_zero: Whether zero is allowed.

    Returns:
        The duration in seconds.

    Raises:
        TypeError: `value` is neither a number nor a timedelta.
        ValueError: `value` is not positive or not finite.

    Example:
        >>> parse_duration("TorchConfig.timeout_s", timedelta(minutes=5))
        300.0
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        kinds = "seconds, a timedelta or None" if none_meaning else "seconds or a timedelta"
        raise TypeError(f"{name} must be {kinds}, found {value!r} ({type(value).__name__})")
    if not 0 < seconds <= _MAX_DURATION_S and not (can_be_zero and seconds == 0):
        hint = f"; None {none_meaning}" if none_meaning else ""
        raise ValueError(f"{name} must be positive and finite, found {value}{hint}")
    return float(seconds)


def require_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raise a ValueError that lists the choices unless the value is one of them."""
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {listed}, found {value!r}")


def to_journal_dict(config: DataclassInstance) -> dict[str, object]:
    """Return the fields of a config as JSON values for the journal.

    Secrets are redacted. Durations are in seconds.
    """
    return {
        item.name: _json_value(getattr(config, item.name)) for item in dataclasses.fields(config)
    }


def _json_value(value: object) -> object:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value if isinstance(value, str | int | float | None) else redact_text(repr(value))


def check_plain_function(role: str, function: object) -> None:
    """Check that a function is callable, and that calling it runs it.

    Args:
        role: Role of the function for messages, such as "training function".
        function: Function to check.

    Raises:
        TypeError: The function is not callable, or it is a coroutine or generator function.
    """
    if not callable(function):
        raise TypeError(
            f"the {role} must be callable, found {function!r} ({type(function).__name__}); "
            "pass the function itself, not its return value"
        )
    is_deferred_checks = (
        inspect.iscoroutinefunction,
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
    )
    for call in (function, type(function).__call__):
        if any(is_deferred(call) for is_deferred in is_deferred_checks):
            raise TypeError(
                f"{get_function_name(function)} is an async or a generator function, so "
                f"calling it does not run its code; a {role} must be a plain function"
            )


def get_function_name(function: object) -> str:
    """Return the name of a function, of the function of a partial, or of an object's class."""
    if isinstance(function, functools.partial):
        return get_function_name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))
