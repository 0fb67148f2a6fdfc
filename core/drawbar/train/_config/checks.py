"""What every config shares: a repr of what was set, and checks whose errors say what was found."""

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
    require_type("RunConfig.name", name, str)
    path = PurePath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(
            f"RunConfig.name={name!r} would leave the storage path; "
            "give a plain name, and the folder as storage_path"
        )
    if not name.strip() or name in (".", "./") or re.search(r"[\x00-\x1f]", name):
        raise ValueError(f"RunConfig.name={name!r} is not a usable folder name")
    if (length := max(len(os.fsencode(part)) for part in path.parts)) > _MAX_NAME_BYTES:
        raise ValueError(
            f"RunConfig.name={name[:20] + '...'!r} has {length} bytes; a folder's name has at most "
            f"{_MAX_NAME_BYTES}"
        )


def require_type(name: str, value: object, kind: type | tuple[type, ...]) -> None:
    if not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        expected = " or ".join(k.__name__ for k in kinds)
        raise TypeError(f"{name} must be {expected}, found {value!r} ({type(value).__name__})")


def is_list_of(kind: type, value: object) -> bool:
    if not isinstance(value, Sequence | Set) or isinstance(value, str):
        return False
    return all(isinstance(item, kind) for item in value)


def resolve_config(name: str, value: T | None, kind: type[T]) -> T:
    """Give the config that was passed as an argument of this name, or a default one.

    Raises:
        TypeError: It is of another kind; the message says which is wanted.
    """
    if value is None:
        return kind()
    if not isinstance(value, kind):
        article = "an" if kind.__name__[0] in "AEIOX" else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}, found {value!r}")
    return value


def require_int(name: str, value: object, *, at_least: int) -> None:
    # True is an int to Python, and `num_workers=True` a mistake.
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an int, found {value!r} ({type(value).__name__})")
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, found {value}")


def parse_duration(
    name: str, value: object, *, none_meaning: str = "", can_be_zero: bool = False
) -> float:
    """Check a duration, which is a number of seconds or a timedelta, and give it in seconds.

    Args:
        name: Of the setting or argument, such as "TorchConfig.timeout_s".
        value: What was given.
        none_means: What None says, where that is allowed, for the message; the caller looks for it.
        can_be_zero: Whether no time at all is a duration.

    Raises:
        TypeError: It is neither.
        ValueError: It is not positive, or not finite.
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
    if value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        raise ValueError(f"{name} must be one of {listed}, found {value!r}")


def to_journal_dict(config: DataclassInstance) -> dict[str, object]:
    """Return the fields of a config as JSON values without secrets, for the journal.

    Durations are in seconds.
    """
    return {
        item.name: _json_value(getattr(config, item.name)) for item in dataclasses.fields(config)
    }


def _json_value(value: object) -> object:
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value if isinstance(value, str | int | float | None) else redact_text(repr(value))


def check_plain_function(role: str, function: object) -> None:
    """Check that a function runs when it is called; `what` names it.

    Raises:
        TypeError: It is not callable, or is a coroutine or generator function.
    """
    if not callable(function):
        raise TypeError(
            f"the {role} must be callable, found {function!r} ({type(function).__name__}); "
            "pass the function itself, not what it returns"
        )
    never_run = (
        inspect.iscoroutinefunction,
        inspect.isgeneratorfunction,
        inspect.isasyncgenfunction,
    )
    for call in (function, type(function).__call__):
        if any(is_kind(call) for is_kind in never_run):
            raise TypeError(
                f"{get_function_name(function)} is an async or a generator function, so that "
                "calling it runs "
                f"none of it; a {role} is a plain function"
            )


def get_function_name(function: object) -> str:
    if isinstance(function, functools.partial):
        return get_function_name(function.func)
    return str(getattr(function, "__name__", type(function).__name__))
