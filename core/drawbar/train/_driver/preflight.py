"""What can be checked in the driver before any process starts.

Each check ends in an error at the user's own call of `fit()`, instead of in a worker's log minutes
later. Nothing here needs Ray; what the cluster can hold is checked by `_group.capacity`.
"""

from __future__ import annotations

import contextlib
import dis
import errno
import functools
import inspect
import itertools
import os
import pwd
import tempfile
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from drawbar.train._config.checks import check_plain_function, get_function_name, warn_caller
from drawbar.train._serialization import serialize
from drawbar.train._storage.sizes import format_size

LARGE_PICKLE_BYTES = 100_000_000
"""Bytes of a pickled training function above which `check_train_function_pickles` warns."""

# Objects may refer to as many others as a model has: this far a culprit is found in a moment.
_SEARCH_DEPTH = 5
_SEARCH_WIDTH = 200


def check_train_function(function: Callable[..., object], *, has_config: bool = False) -> bool:
    """Check that a training function can be called with no argument, or with the
    `train_loop_config`.

    Args:
        function: The training function.
        has_config: Whether there is a `train_loop_config`.

    Returns:
        Whether it gets the config: it has one required positional argument, or it has one with a
        default and there is a config. A builtin that does not say what it takes gets one that is.

    Raises:
        TypeError: It is not callable, is a coroutine or generator function (a call would run none
            of it), or needs other arguments. The message has its signature.
    """
    check_plain_function("training function", function)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin that does not say what it takes
        return has_config
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in signature.parameters.values() if p.kind not in variable]
    required = [parameter for parameter in named if parameter.default is parameter.empty]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        names = ", ".join(parameter.name for parameter in required)
        raise TypeError(
            f"{get_function_name(function)}{signature} must be given {names}; a training "
            "function takes no argument, or one positional argument: the train_loop_config. "
            "Bind others with functools.partial"
        )
    positional = [p for p in named if p.kind is not p.KEYWORD_ONLY]
    return len(required) == 1 or (has_config and len(positional) == 1)


def warn_of_unused_config(takes_config: bool, config: object) -> None:
    """Warn of a `train_loop_config` that, as `check_train_function` said, the function does not
    get."""
    if config and not takes_config:
        found = ", ".join(map(repr, config)) if isinstance(config, Mapping) else repr(config)
        warn_caller(
            f"train_loop_config has {found}, but the training function takes no argument and never "
            "gets it; write it as `def train(config):`"
        )


def check_train_function_pickles(function: Callable[..., object]) -> None:
    """Check that a training function and the variables it captures can be sent to the workers.

    Warns with a `UserWarning` that names the largest captured variables if each worker would load
    more than `LARGE_PICKLE_BYTES` bytes.

    Raises:
        TypeError: A captured variable cannot be pickled. The message has the path of each such
            variable, its type, and the reason.
    """
    try:
        size = serialize(function, should_share_buffers=True).size
    except Exception as error:
        unpicklable = _find_unpicklable(
            get_function_name(function), _get_called_function(function), _SEARCH_DEPTH, set()
        )
        listed = "\n".join(f"  {path} ({_format_type(at)}): {why}" for path, at, why in unpicklable)
        raise TypeError(
            f"{get_function_name(function)} cannot be sent to the workers, since it captures what "
            "cannot be "
            f"pickled:\n{listed or f'  {error}'}\n"
            "Create it inside the training function; pass what that needs as train_loop_config"
        ) from None  # the traceback of the pickler has only internal frames
    if size > LARGE_PICKLE_BYTES:
        warnings.warn(_describe_large_function(function, size), UserWarning, stacklevel=2)


def check_pickles(name: str, value: object) -> None:
    """Check that an argument can be sent to the workers.

    Raises:
        TypeError: Something in it cannot be pickled. The message has the path of each such part.
    """
    unpicklable = _find_unpicklable(name, value, _SEARCH_DEPTH, set())
    if unpicklable:
        listed = "\n".join(f"  {path} ({_format_type(at)}): {why}" for path, at, why in unpicklable)
        raise TypeError(
            f"{name} cannot be sent to the workers, since it holds what cannot be "
            f"pickled:\n{listed}"
        )


def check_storage_path(path: Path) -> None:
    """Check that a run can write to a local folder, which is created if need be.

    A small file is written, synced and removed.

    Raises:
        OSError: It cannot, as the subclass that the system's error has (`PermissionError`,
            `NotADirectoryError` ...). The message has the path, the user, and what to do.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path, prefix=".drawbar-probe-") as probe:
            probe.write(bytes(4096))
            probe.flush()
            os.fsync(probe.fileno())  # a full disk may show only now
    except OSError as error:
        raise OSError(
            error.errno,
            f"storage_path={str(path)!r} cannot be written by user {_get_user_name()}: "
            f"{error.strerror}; "
            f"{_suggest_fix(error.errno)}",
        ) from None


def _suggest_fix(number: int | None) -> str:
    if number in (errno.EEXIST, errno.ENOTDIR):
        return "the path, or a part of it, is a file: give a folder"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or set RunConfig.storage_path to another disk"
    return "set RunConfig.storage_path to a folder that this user may write"


def _get_user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container's user id without a name
        return str(os.geteuid())


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
        "loads all "
        f"of it. The largest that it captures: {', '.join(largest[:3])}. Load it inside the "
        "training function, pass it as datasets=, or put it in the object store with ray.put and "
        "pass the reference"
    )


def _iter_captured_sizes(
    path: str, value: object, depth: int, seen: set[int]
) -> Iterator[tuple[int, str, str]]:
    """Give size, path and type of what code captures, seen through large functions and methods."""
    for name, part in _iter_captured(value):
        if id(part) in seen:
            continue
        seen.add(id(part))
        size = serialize(part, should_share_buffers=True).size
        # What is small in itself is named as it is: the search is for what makes up the size.
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
    found = [
        culprit
        for name, part in parts
        for culprit in _find_unpicklable(
            f"{path}{_format_path_element(name)}", part, depth - 1, seen
        )
    ]
    return found or [(path, value, reason)]


def _get_pickle_error(value: object) -> str | None:
    try:
        serialize(value, should_share_buffers=True)
    except Exception as error:
        return str(error) or type(error).__name__
    return None


def _iter_parts(value: object) -> Iterator[tuple[str, object]]:
    """Give what pickling `value` would pickle too, by name."""
    yield from _iter_captured(value)
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", item) for key, item in value.items())
    elif isinstance(value, list | tuple | set | frozenset):
        yield from ((f"[{index}]", item) for index, item in enumerate(value))
    elif not isinstance(value, type | types.ModuleType | types.FunctionType):
        yield from getattr(value, "__dict__", {}).items()


def _iter_captured(value: object) -> Iterator[tuple[str, object]]:
    """Give what a function, method or partial captures, by name; nothing for any other object."""
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
    """Give the function, method or partial itself, or the method that calling an object runs."""
    is_code = isinstance(function, types.FunctionType | types.MethodType | functools.partial)
    return function if is_code else types.MethodType(type(function).__call__, function)


def _list_global_names(code: types.CodeType) -> set[str]:
    """Give the global names that code reads, nested functions included."""
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
