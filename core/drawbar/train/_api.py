"""Set the public module of classes and functions."""

from __future__ import annotations

import contextlib
import sys
from types import FunctionType
from typing import Any


def set_public_module(namespace: dict[str, Any]) -> None:
    """Set `__module__` of the classes and functions of a public module to that module.

    A `repr`, a traceback, and a pickle then contain `drawbar.train.RunConfig`, independent of the
    private module that defines the class, so that pickles still load when the class has moved. Only
    objects of private modules are changed; an object of two public modules belongs to the first.

    As a drawback, `inspect.getsource` raises OSError for these classes (but not for methods and
    functions), since it opens the file of `__module__`. NumPy's classes have the same drawback.

    Args:
        namespace: The `globals()` of the module. Call this function below its `__all__`.

    Example:
        __all__ = ["MyConfig"]

        set_public_module(globals())
    """
    for name in namespace["__all__"]:
        value = namespace.get(name)  # None for names that are imported on first use
        module = getattr(value, "__module__", None) or ""
        # Objects of public modules and of other libraries keep their names.
        if "._" not in module or not isinstance(value, type | FunctionType):
            continue
        if isinstance(value, type):
            _evaluate_annotations(value)
            for member in vars(value).values():
                function = getattr(member, "__func__", member)
                if isinstance(function, FunctionType) and function.__module__ == module:
                    function.__module__ = namespace["__name__"]
        value.__module__ = namespace["__name__"]


def _evaluate_annotations(cls: type) -> None:
    """Evaluate annotations in the private module of a class before `__module__` changes.

    `typing.get_type_hints` and msgspec would look names up in the public module. Names that are
    only imported for type checkers stay strings.
    """
    annotations = vars(cls).get("__annotations__", {})
    for name, annotation in annotations.items():
        text = getattr(annotation, "__forward_arg__", annotation)  # NamedTuples have ForwardRefs
        if isinstance(text, str):
            with contextlib.suppress(NameError):
                annotations[name] = eval(text, vars(sys.modules[cls.__module__]), dict(vars(cls)))
