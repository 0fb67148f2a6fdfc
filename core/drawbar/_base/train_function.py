"""The user's training function: type, checks, and the identity by which a rerun finds it."""

from __future__ import annotations

import contextlib
import functools
import inspect
import os
import types
from collections.abc import Callable
from typing import Any

import msgspec

TrainFunction = Callable[[], Any] | Callable[[dict[str, Any]], Any]
"""A training function without arguments, or with `train_loop_config` as its argument."""

_SCRIPT_MODULE = "__main__"


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


class FunctionIdentity(msgspec.Struct, frozen=True):
    """Name and origin of a training function. The source code is not part of it.

    Attributes:
        module: Module that defines the function, `__main__` for scripts and notebooks.
        qualname: Qualified name, such as `train_func` or `main.<locals>.train_func`. It is "" if
            a whole script is the training function.
        file: Real path of the source file, "" in notebooks and interactive sessions.
    """

    module: str
    qualname: str
    file: str = ""

    @classmethod
    def of(cls, function: object) -> FunctionIdentity:
        """Return the identity of a function, method, `functools.partial`, or callable object.

        Decorators that use `functools.wraps` and arguments that are bound by `partial` do not
        matter. All lambdas in the same scope have the same identity.
        """
        while isinstance(function, functools.partial):
            function = function.func
        owner, code, suffix = function, function, ""
        if isinstance(function, types.MethodType):
            bound = function.__self__
            owner = bound if inspect.isclass(bound) else type(bound)
            code, suffix = function.__func__, f".{function.__name__}"
        elif not (inspect.isroutine(function) or inspect.isclass(function)):
            owner, code = type(function), type(function).__call__
        name = getattr(owner, "__qualname__", type(owner).__qualname__)
        return cls(getattr(owner, "__module__", None) or "", name + suffix, _source_file(code))

    @classmethod
    def of_script(cls, script: str, *, is_module: bool) -> FunctionIdentity:
        """Return the identity of a script (by path), or of a module that is run as a script."""
        return cls(script, "") if is_module else cls(_SCRIPT_MODULE, "", os.path.realpath(script))

    def is_same(self, other: FunctionIdentity) -> bool:
        """Return whether both are the same function, as far as this is known.

        The same file proves that a script and an imported module are the same. Different files
        only count for scripts, since an installed module may move. Notebooks have no file.
        """
        if self.qualname != other.qualname:
            return False
        if self.file and self.file == other.file:
            return True
        is_other_script = self.module == _SCRIPT_MODULE and bool(self.file and other.file)
        return self.module == other.module and not is_other_script

    def __str__(self) -> str:
        if self.module != _SCRIPT_MODULE:
            return ".".join(part for part in (self.module, self.qualname) if part)
        origin = self.file or "an interactive session"
        return f"{self.qualname} in {origin}" if self.qualname else origin


def _source_file(function: object) -> str:
    with contextlib.suppress(ValueError):  # __wrapped__ refers back to the function
        function = inspect.unwrap(function)  # type: ignore[arg-type]  # any object will do
    # Not the file of the module `__main__`: restore() unpickles functions of other scripts.
    file = getattr(getattr(function, "__code__", None), "co_filename", "")
    # Notebooks have made-up file names, which differ from kernel to kernel.
    return os.path.realpath(file) if os.path.isfile(file) else ""
