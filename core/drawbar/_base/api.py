"""Base tools of the public API: module names of its objects, and errors for unknown arguments."""

from __future__ import annotations

import contextlib
import difflib
import inspect
import sys
from collections.abc import Iterable, Mapping
from types import FunctionType
from typing import TYPE_CHECKING, Any, ClassVar, Self

from drawbar._base.frames import without_internal_frames


def set_public_module(
    namespace: dict[str, Any], *, module: str = "", names: Iterable[str] = ()
) -> None:
    """Set `__module__` of the classes and functions of a public module to that module.

    A `repr`, a traceback, and a pickle then contain `drawbar.train.RunConfig`, independent of the
    private module that defines the class, so that pickles still load when the class has moved. Only
    objects of private modules are changed; an object of two public modules belongs to the first.

    As a drawback, `inspect.getsource` raises OSError for these classes (but not for methods and
    functions), since it opens the file of `__module__`. NumPy's classes have the same drawback.

    Args:
        namespace: The `globals()` of the module. Call this function below its `__all__`.
        module: Public module, for a call in the private module of objects that the public one
            imports on first use. Default: the name in the namespace.
        names: Names of these objects. Default: `__all__`.

    Example:
        ```python
        __all__ = ["MyConfig"]

        set_public_module(globals())
        ```
    """
    public_module = module or namespace["__name__"]
    for name in names or namespace["__all__"]:
        value = namespace.get(name)  # None for names that are imported on first use
        private_module = getattr(value, "__module__", None) or ""
        # Objects of public modules and of other libraries keep their names.
        if "._" not in private_module or not isinstance(value, type | FunctionType):
            continue
        if isinstance(value, type):
            # In the private module: `typing.get_type_hints` and msgspec would use the public one.
            vars(value).get("__annotations__", {}).update(evaluate_annotations(value))
            for member in vars(value).values():
                function = getattr(member, "__func__", member)
                if isinstance(function, FunctionType) and function.__module__ == private_module:
                    function.__module__ = public_module
        value.__module__ = public_module


def evaluate_annotations(cls: type) -> dict[str, Any]:
    """Return the annotations of a class, evaluated in its module. Inherited ones are omitted.

    Annotations that cannot be evaluated, such as names that are only imported for type checkers,
    stay strings.
    """
    annotations = dict(inspect.get_annotations(cls))
    module = sys.modules.get(cls.__module__)
    for name, annotation in annotations.items():
        text = getattr(annotation, "__forward_arg__", annotation)  # NamedTuples have ForwardRefs
        if isinstance(text, str):
            with contextlib.suppress(Exception):  # any expression, in a class of the user
                annotations[name] = eval(text, vars(module) if module else {}, dict(vars(cls)))
    return annotations


class _InitSignature:
    """Signature of `__init__` for `help()` and completion, which would show that from `__new__`."""

    def __get__(self, _: object, kind: Any) -> inspect.Signature:
        signature = inspect.signature(kind.__init__)
        return signature.replace(parameters=[*signature.parameters.values()][1:])


class _ShortTracebacks(type):
    """Metaclass of classes whose constructors raise errors without the frames of Drawbar."""

    if not TYPE_CHECKING:  # type checkers would no longer check the arguments

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            try:
                return super().__call__(*args, **kwargs)
            except Exception as error:
                raise without_internal_frames(error)  # noqa: B904  # the same error


class ArgumentErrors(metaclass=_ShortTracebacks):
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
