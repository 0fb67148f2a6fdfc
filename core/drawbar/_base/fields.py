"""Declare the fields of config classes, and check their values.

The annotation of a field is its declaration. `CheckedConfig` checks values against it:

    @dataclass(frozen=True)
    class MyConfig(CheckedConfig):
        is_cached: bool = False
        mode: Literal["fast", "exact"] = "fast"
        num_retries: Annotated[int, at_least(0)] = 3
        timeout_s: Annotated[float | timedelta, parse_duration] = 60

A function in `Annotated` replaces the check of the type. It receives the name of the field for
messages (`MyConfig.timeout_s`) and the value, and returns the value to store. It is not called for
None if the type includes None. Rules between several fields belong in `__post_init__`.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Callable, Hashable, Sequence, Set
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, Union

from drawbar._base.api import ArgumentErrors, evaluate_annotations
from drawbar._base.secrets import redact_text

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
FieldCheck = Callable[[str, Any], Any]
"""Check of a field: receives its name and value, and returns the value to store."""

_MAX_DURATION_S = timedelta.max.total_seconds()


class CheckedConfig(ArgumentErrors):
    """Base class of dataclasses whose fields are checked against their annotations."""

    def __post_init__(self, *_: object) -> None:
        cls: Any = type(self)
        for name, check in _list_checks(cls).items():
            value = getattr(self, name)
            checked = check(f"{cls.__name__}.{name}", value)
            if checked is not value:
                # The dataclass is frozen, so bypass its __setattr__.
                object.__setattr__(self, name, checked)


class ConfigRepr(CheckedConfig):
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


@functools.cache
def _list_checks(cls: Any) -> dict[str, FieldCheck]:
    """Return the checks of the fields of a dataclass, by name."""
    annotations: dict[str, Any] = {}
    for base in reversed(cls.__mro__):
        annotations |= evaluate_annotations(base)
    checks = {item.name: _make_check(annotations[item.name]) for item in dataclasses.fields(cls)}
    return {name: check for name, check in checks.items() if check is not None}


def _make_check(annotation: Any) -> FieldCheck | None:
    """Return the check for an annotation, None for types that are not checked."""
    is_annotated = typing.get_origin(annotation) is Annotated
    kind = annotation.__origin__ if is_annotated else annotation
    is_union = typing.get_origin(kind) in (Union, types.UnionType)
    options = typing.get_args(kind) if is_union else (kind,)
    if is_annotated:
        functions = [f for f in annotation.__metadata__ if callable(f) and not isinstance(f, type)]
        if functions:
            return partial(_apply_check, functions[0], type(None) in options)
    if all(o is type(None) or typing.get_origin(o) is Literal for o in options):
        choices = [c for o in options for c in typing.get_args(o) or (None,)]
        return partial(require_choice, choices=choices)
    expected_types = tuple(typing.get_origin(option) or option for option in options)
    if all(map(_is_checkable, expected_types)):
        return partial(require_type, expected_type=expected_types)
    return None


def _apply_check(check: FieldCheck, can_be_none: bool, name: str, value: object) -> object:
    return value if value is None and can_be_none else check(name, value)


def _is_checkable(kind: object) -> bool:
    """Return whether `isinstance` works for an annotation."""
    try:
        isinstance(None, kind)  # type: ignore[arg-type]
    except TypeError:  # a string, a protocol, a type variable ...
        return False
    return True


def require_type(name: str, value: T, expected_type: type | tuple[type, ...]) -> T:
    """Return a value after checking that it is an instance of one of some types.

    As in annotations, an int is a float. A bool is no number: `num_workers=True` is a mistake.

    Raises:
        TypeError: It is not. The message names the setting.
    """
    kinds = expected_type if isinstance(expected_type, tuple) else (expected_type,)
    accepted = (*kinds, int) if float in kinds else kinds
    is_mistaken_bool = isinstance(value, bool) and bool not in kinds and int in accepted
    if is_mistaken_bool or not isinstance(value, accepted):
        expected = _describe_types(kinds)
        raise TypeError(f"{name} must be {expected}, found {value!r} ({type(value).__name__})")
    return value


def _describe_types(kinds: Sequence[type]) -> str:
    names = ["None" if kind is type(None) else kind.__name__ for kind in kinds]
    article = "an" if names[0][0] in "aeioAEIOX" else "a"
    *others, last = names
    comma = "," if len(others) > 1 else ""
    return f"{article} {', '.join(others)}{comma} or {last}" if others else f"{article} {last}"


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
        ```python
        torch_config = resolve_config("torch_config", torch_config, TorchConfig)
        ```
    """
    return kind() if value is None else require_type(name, value, kind)


def require_choice(name: str, value: T, choices: Sequence[object]) -> T:
    """Return a value after checking that it is one of some choices.

    Raises:
        ValueError: It is not. The message lists the choices.
    """
    # Without a hash, as an array, a value may not be comparable.
    if not isinstance(value, Hashable) or value not in choices:
        listed = ", ".join(repr(choice) for choice in choices)
        one_of = "one of " if len(choices) > 1 else ""
        raise ValueError(f"{name} must be {one_of}{listed}, found {value!r}")
    return value


def at_least(minimum: int) -> FieldCheck:
    """Return a check for an annotation: the field is an int and not below a minimum.

    Args:
        minimum: Smallest value.

    Returns:
        The check, which raises TypeError or ValueError.

    Example:
        ```python
        @dataclass(frozen=True)
        class MyConfig(BackendConfig):
            num_threads: Annotated[int, at_least(1)] = 8
        ```
    """
    return partial(require_int, at_least=minimum)


def require_int(name: str, value: int, *, at_least: int) -> int:
    """Return a value after checking that it is an int and not below a minimum.

    Raises:
        TypeError: The value is not an int.
        ValueError: The value is below `at_least`.
    """
    require_type(name, value, int)
    if value < at_least:
        raise ValueError(f"{name} must be at least {at_least}, found {value}")
    return value


def list_of(item_type: type, description: str) -> FieldCheck:
    """Return a check for an annotation: the field is a list, set, or tuple of instances of a type.

    The field becomes a tuple.

    Args:
        item_type: Type of the items.
        description: Description of the list, for the message.
    """

    def check(name: str, value: Any) -> tuple[Any, ...]:
        is_list = isinstance(value, Sequence | Set) and not isinstance(value, str)
        if not is_list or not all(isinstance(item, item_type) for item in value):
            raise TypeError(f"{name} must be {description}, found {value!r}")
        return tuple(value)

    return check


def parse_duration(
    name: str, value: object, *, none_meaning: str = "", can_be_zero: bool = False
) -> float:
    """Convert a duration in seconds or as a timedelta to seconds.

    Use it in a function, or as the check of a config's field.

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
        >>> parse_duration("timeout", timedelta(minutes=5))
        300.0

        @dataclass(frozen=True)
        class MyConfig(BackendConfig):
            timeout_s: Annotated[float | timedelta, parse_duration] = 60
    """
    seconds = value.total_seconds() if isinstance(value, timedelta) else value
    if isinstance(seconds, bool) or not isinstance(seconds, int | float):
        kinds = "seconds, a timedelta or None" if none_meaning else "seconds or a timedelta"
        raise TypeError(f"{name} must be {kinds}, found {value!r} ({type(value).__name__})")
    if not 0 < seconds < _MAX_DURATION_S and not (can_be_zero and seconds == 0):
        hint = f"; None {none_meaning}" if none_meaning else ""
        raise ValueError(f"{name} must be positive and finite, found {value}{hint}")
    return float(seconds)


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
