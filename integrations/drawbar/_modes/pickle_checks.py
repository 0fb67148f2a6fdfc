"""Find what cannot be pickled, or is large, in a training function and its arguments."""

from __future__ import annotations

import contextlib
import dis
import functools
import inspect
import itertools
import types
from collections.abc import Callable, Iterator, Mapping

from drawbar._base.frames import warn_caller
from drawbar._base.train_function import get_function_name
from drawbar._base.wording import format_size
from drawbar._process.serialization import serialize

LARGE_PICKLE_BYTES = 100_000_000
"""Bytes of a pickled training function above which `warn_of_large_function` warns."""


# Objects may refer to as many others as a model does. This depth is searched in a moment.
_SEARCH_DEPTH = 5


_SEARCH_WIDTH = 200


def check_train_function_pickles(function: Callable[..., object]) -> None:
    """Check that a training function and the variables it captures can be sent to the workers.

    Raises:
        TypeError: A captured variable cannot be pickled. The message has the path, type, and reason
            for each variable that cannot be pickled.
    """
    try:
        serialize(function, should_share_buffers=True)
    except Exception as error:
        unpicklable = _find_unpicklable(
            get_function_name(function), _get_called_function(function), _SEARCH_DEPTH, set()
        )
        lines = "\n".join(
            f"  {path} ({_format_type(part)}): {reason}" for path, part, reason in unpicklable
        )
        raise TypeError(
            f"{get_function_name(function)} cannot be sent to the workers, because it captures "
            f"variables that cannot be pickled:\n{lines or f'  {error}'}\n"
            "Create them inside the training function; pass their arguments as train_loop_config"
        ) from None  # the traceback of the pickler has only internal frames


def warn_of_large_function(function: Callable[..., object], pickled_bytes: int) -> None:
    """Warn if each worker would load more than `LARGE_PICKLE_BYTES` bytes of a training function.

    The warning names the largest captured variables.

    Args:
        function: The training function.
        pickled_bytes: Size of the function with its config.
    """
    if pickled_bytes > LARGE_PICKLE_BYTES:
        size = serialize(function, should_share_buffers=True).size
        if size > LARGE_PICKLE_BYTES:
            warn_caller(_describe_large_function(function, size))


def check_pickles(name: str, value: object) -> None:
    """Check that an argument can be sent to the workers.

    Raises:
        TypeError: Something in it cannot be pickled. The message has the path of each part.
    """
    unpicklable = _find_unpicklable(name, value, _SEARCH_DEPTH, set())
    if unpicklable:
        lines = "\n".join(
            f"  {path} ({_format_type(part)}): {reason}" for path, part, reason in unpicklable
        )
        raise TypeError(
            f"{name} cannot be sent to the workers, because it contains parts that cannot be "
            f"pickled:\n{lines}"
        ) from None  # the traceback of the pickler has only internal frames


def _describe_large_function(function: Callable[..., object], size: int) -> str:
    captured = sorted(
        _iter_captured_sizes(
            get_function_name(function), _get_called_function(function), _SEARCH_DEPTH, set()
        ),
        reverse=True,
    )
    largest = [
        f"{path} ({kind}, {format_size(n)})" for n, path, kind in captured if n > size // 100
    ]
    return (
        f"{get_function_name(function)} takes {format_size(size)} when pickled, and every worker "
        f"loads all of it. The largest captured variables are {', '.join(largest[:3])}. Load them "
        "inside the training function, pass them as datasets=, or put them in the object store "
        "with ray.put and pass the references"
    )


def _iter_captured_sizes(
    path: str, value: object, depth: int, seen: set[int]
) -> Iterator[tuple[int, str, str]]:
    """Yield size, path, and type of captured variables, recursing into large functions."""
    for name, part in _iter_captured(value):
        if id(part) in seen:
            continue
        seen.add(id(part))
        size = serialize(part, should_share_buffers=True).size
        # A small variable is listed as it is: the search is for the parts that make up the size.
        if depth and size > LARGE_PICKLE_BYTES // 100 and any(True for _ in _iter_captured(part)):
            yield from _iter_captured_sizes(f"{path}.{name}", part, depth - 1, seen)
        else:
            yield size, f"{path}.{name}", _format_type(part)


def _find_unpicklable(
    path: str, value: object, depth: int, seen: set[int]
) -> list[tuple[str, object, str]]:
    """Find the innermost parts that cannot be pickled, as (path, value, reason)."""
    if id(value) in seen or (reason := _get_pickle_error(value)) is None:
        return []
    seen.add(id(value))
    parts = itertools.islice(_iter_parts(value), _SEARCH_WIDTH) if depth else ()
    unpicklable = [
        entry
        for name, part in parts
        for entry in _find_unpicklable(f"{path}{_format_path_element(name)}", part, depth - 1, seen)
    ]
    return unpicklable or [(path, value, reason)]


def _get_pickle_error(value: object) -> str | None:
    try:
        serialize(value, should_share_buffers=True)
    except Exception as error:
        return str(error) or type(error).__name__
    return None


def _iter_parts(value: object) -> Iterator[tuple[str, object]]:
    """Yield the parts that pickling `value` would pickle too, by name."""
    yield from _iter_captured(value)
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif not isinstance(value, type | types.ModuleType | types.FunctionType):
        yield from getattr(value, "__dict__", {}).items()


def _iter_captured(value: object) -> Iterator[tuple[str, object]]:
    """Yield the variables that a function, method, or partial captures, by name."""
    if isinstance(value, functools.partial):
        yield from _iter_captured(value.func)
        yield from ((f"args[{index}]", argument) for index, argument in enumerate(value.args))
        yield from value.keywords.items()
    elif isinstance(value, types.MethodType):
        attributes = getattr(value.__self__, "__dict__", None) or {}
        yield from ((f"self.{name}", item) for name, item in attributes.items())
        yield from _iter_captured(value.__func__)
    elif isinstance(value, types.FunctionType):
        for name, cell in zip(value.__code__.co_freevars, value.__closure__ or (), strict=True):
            with contextlib.suppress(ValueError):  # an empty cell: not assigned yet
                yield name, cell.cell_contents
        for name in sorted(_list_global_names(value.__code__) & value.__globals__.keys()):
            yield name, value.__globals__[name]
        defaults = inspect.signature(value, follow_wrapped=False).parameters.values()
        yield from ((p.name, p.default) for p in defaults if p.default is not p.empty)


def _get_called_function(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function, method, or partial itself, or the `__call__` method of another object."""
    is_code = isinstance(function, types.FunctionType | types.MethodType | functools.partial)
    return function if is_code else types.MethodType(type(function).__call__, function)


def _list_global_names(code: types.CodeType) -> set[str]:
    """Return the global names that code reads, including nested functions."""
    names = {
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME")
    }
    nested = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return names.union(*map(_list_global_names, nested))


def _format_path_element(name: str) -> str:
    return name if name.startswith("[") else f".{name}"


def _format_type(value: object) -> str:
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"
