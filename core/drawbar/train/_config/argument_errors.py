"""Reject unknown constructor arguments with a suggestion."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self


class _InitSignature:
    """Signature of `__init__` for `help()` and completion, which would show that from `__new__`."""

    def __get__(self, _: object, kind: Any) -> inspect.Signature:
        signature = inspect.signature(kind.__init__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])


class ArgumentErrors:
    """Base class that rejects unknown constructor arguments with a suggestion."""

    _replacements: ClassVar[Mapping[str, str]] = {}
    """Arguments of other libraries, each with the replacement to suggest."""
    __signature__ = _InitSignature()

    def __new__(cls, *_: object, **arguments: object) -> Self:
        known = cls.__signature__.parameters
        if all(parameter.kind is not parameter.VAR_KEYWORD for parameter in known.values()):
            for name in arguments.keys() - known.keys():
                advice = cls._replacements.get(name) or suggest_name(name, known)
                raise TypeError(f"{cls.__name__} takes no {name}=: {advice}")
        return super().__new__(cls)


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Return a hint with the closest known name, or with all known names."""
    known = list(known)
    # Compare without the common suffix, which would make all config names similar.
    known_by_stem = {option.removesuffix("_config"): option for option in known}
    matches = difflib.get_close_matches(name.removesuffix("_config"), known_by_stem, n=1)
    if matches:
        return f"did you mean {known_by_stem[matches[0]]!r}?"
    return f"it takes {', '.join(known) or 'none'}"
