"""Random messages and commands, drawn from the types of their fields."""

from __future__ import annotations

import enum
import math
import random
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import msgspec

from drawbar._process.serialization import Serialized

CHARACTERS = 'abcäß漢🙂 \n"\\\udc80\udcff'  # the last two are not valid Unicode
PATH_FIELDS = ("path", "checkpoint_name")
MAX_ITEMS = 3


def draw(rng: random.Random, expected: Any) -> Any:
    """Return a random value of a type, such as a struct or a union of structs."""
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        return draw(rng, rng.choice(arguments))
    if origin is Literal:
        return rng.choice(arguments)
    if origin is tuple and arguments[-1] is not ...:
        return tuple(draw(rng, argument) for argument in arguments)
    if origin in (tuple, list):
        return origin(draw(rng, arguments[0]) for _ in range(rng.randint(0, MAX_ITEMS)))
    if origin is dict:
        count = rng.randint(0, MAX_ITEMS)
        return {draw(rng, arguments[0]): draw(rng, arguments[1]) for _ in range(count)}
    if issubclass(expected if isinstance(expected, type) else object, msgspec.Struct):
        return _draw_struct(rng, expected)
    if isinstance(expected, type) and is_dataclass(expected):
        hints = get_type_hints(expected)
        return expected(**{field.name: draw(rng, hints[field.name]) for field in fields(expected)})
    return _draw_scalar(rng, expected)


def _draw_struct(rng: random.Random, struct: type[msgspec.Struct]) -> msgspec.Struct:
    hints = get_type_hints(struct)
    values = {
        name: f"x{draw(rng, str)}" if name in PATH_FIELDS else draw(rng, hints[name])
        for name in struct.__struct_fields__
    }
    return struct(**values)


def _draw_scalar(rng: random.Random, expected: Any) -> Any:
    if expected in (Any, object):
        kinds: list[Any] = [str, int, float, bool, type(None), list[Any], dict[str, Any], 2**200]
        kind = rng.choice(kinds)
        return rng.randint(-kind, kind) if isinstance(kind, int) else draw(rng, kind)
    if expected is Serialized:
        return Serialized(draw(rng, bytes), (draw(rng, bytes),))
    if issubclass(expected, enum.Enum):
        return rng.choice(list(expected))
    draws: dict[Any, Callable[[], Any]] = {
        type(None): lambda: None,
        bool: lambda: rng.random() < 0.5,
        int: lambda: rng.choice([0, -1, 2**63 - 1, -(2**63), rng.randint(0, 1000)]),
        float: lambda: rng.choice([0.0, 1.5, math.nan, math.inf, -math.inf, 5e-324]),
        bytes: lambda: rng.randbytes(rng.randint(0, 20)),
        str: lambda: "".join(rng.choices(CHARACTERS, k=rng.randint(0, 5))),
    }
    return draws[expected]()


def describe(value: object) -> str:
    """Return a text that is equal for equal values. NaN equals NaN, but a tuple is no list."""
    if isinstance(value, msgspec.Struct):
        fields = ((name, describe(getattr(value, name))) for name in value.__struct_fields__)
        return f"{type(value).__name__}({', '.join(f'{name}={text}' for name, text in fields)})"
    if isinstance(value, Serialized):
        return f"Serialized{value.to_parts()!r}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{describe(k)}: {describe(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}({', '.join(map(describe, value))})"
    return repr(value)
