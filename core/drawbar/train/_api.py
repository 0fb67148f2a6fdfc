"""Public objects name the module that they are imported from, not the file that they lie in."""

from __future__ import annotations

import contextlib
import sys
from types import FunctionType
from typing import Any


def set_public_module(namespace: dict[str, Any]) -> None:
    """Have the classes and functions of a public module say that module as their `__module__`.

    A `repr`, a traceback and a pickle then hold `drawbar.train.RunConfig`, wherever the file of the
    class lies today: what was pickled still loads when that has moved. Only what lies in a private
    module is changed, so what two public modules show belongs to the first.

    What it costs: `inspect.getsource` of such a class raises OSError (of its methods, and of
    functions, it works). It opens the file of `__module__`, which a pickle imports, and no class
    can tell the two different things. NumPy's classes, named in the same way, have that too.

    Args:
        window: The `globals()` of the module, below its `__all__`.
    """
    for name in namespace["__all__"]:
        value = namespace.get(name)  # it may be one that is imported by its first use
        home = getattr(value, "__module__", None) or ""
        # What lies in a public module already, or is another library's, has its name.
        if "._" not in home or not isinstance(value, type | FunctionType):
            continue
        if isinstance(value, type):
            _evaluate_annotations(value)
            for member in vars(value).values():
                function = getattr(member, "__func__", member)
                if isinstance(function, FunctionType) and function.__module__ == home:
                    function.__module__ = namespace["__name__"]
        value.__module__ = namespace["__name__"]


def _evaluate_annotations(cls: type) -> None:
    """Evaluate them in the module of the class, since they would be looked up in the public one.

    `typing.get_type_hints` and msgspec do. What is imported for type checkers only stays text.
    """
    annotations = vars(cls).get("__annotations__", {})
    for name, annotation in annotations.items():
        text = getattr(annotation, "__forward_arg__", annotation)  # a NamedTuple has ForwardRefs
        if isinstance(text, str):
            with contextlib.suppress(NameError):
                annotations[name] = eval(text, vars(sys.modules[cls.__module__]), dict(vars(cls)))
