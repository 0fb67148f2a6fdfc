"""What is said of an argument that a class does not take: what was meant, or what replaced it."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, Self


class _InitSignature:
    """What `help()` and completion show of a class, which would be the signature of `__new__`."""

    def __get__(self, _: object, kind: Any) -> inspect.Signature:
        signature = inspect.signature(kind.__init__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])


class ArgumentErrors:
    """Refuses an argument that the class does not take, with what to write instead."""

    _replacements: ClassVar[Mapping[str, str]] = {}
    """What scripts for other libraries pass, and what to write here."""
    __signature__ = _InitSignature()

    def __new__(cls, *_: object, **arguments: object) -> Self:
        taken = cls.__signature__.parameters
        if all(each.kind is not each.VAR_KEYWORD for each in taken.values()):
            for name in arguments.keys() - taken.keys():
                advice = cls._replacements.get(name) or suggest_name(name, taken)
                raise TypeError(f"{cls.__name__} takes no {name}=: {advice}")
        return super().__new__(cls)


def suggest_name(name: str, known: Iterable[str]) -> str:
    """Say which of the known names is like this one, or which there are."""
    known = list(known)
    heads = {each.removesuffix("_config"): each for each in known}  # all configs end alike
    like = difflib.get_close_matches(name.removesuffix("_config"), heads, n=1)
    return f"did you mean {heads[like[0]]!r}?" if like else f"it takes {', '.join(known) or 'none'}"
