"""Check the training function, arguments, and storage before any process starts.

Each check raises at the user's call of `fit()`, instead of in the log of a worker minutes later.
The checks do not need Ray; `_worker_group.capacity` checks the capacity of the cluster.
"""

from __future__ import annotations

import contextlib
import dis
import errno
import functools
import inspect
import itertools
import json
import os
import pwd
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from drawbar._base.frames import warn_caller
from drawbar._base.train_function import check_plain_function, get_function_name
from drawbar._base.wording import format_size
from drawbar._process.serialization import serialize
from drawbar._storage.run_directory import RunDirectory
from drawbar.train._config.run_config import RunConfig

LARGE_PICKLE_BYTES = 100_000_000
"""Bytes of a pickled training function above which `warn_of_large_function` warns."""

# Objects may refer to as many others as a model does. This depth is searched in a moment.
_SEARCH_DEPTH = 5
_SEARCH_WIDTH = 200


def check_train_function(function: Callable[..., object], *, has_config: bool = False) -> bool:
    """Check the signature of a training function.

    It must be callable without arguments, or with the `train_loop_config`.

    Args:
        function: The training function.
        has_config: Whether there is a `train_loop_config`.

    Returns:
        Whether to pass the config: the function has one required positional argument, or one with a
        default and there is a config. A builtin without a signature gets an existing config.

    Raises:
        TypeError: The function is not callable, is a coroutine or generator function (a call would
            not run it), or needs other arguments. The message has its signature.
    """
    check_plain_function("training function", function)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return has_config
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in signature.parameters.values() if p.kind not in variable]
    required = [parameter for parameter in named if parameter.default is parameter.empty]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        names = ", ".join(parameter.name for parameter in required)
        raise TypeError(
            f"{get_function_name(function)}{signature} requires {names}, but a training "
            "function takes no argument or one positional argument, the train_loop_config. "
            "Bind other arguments with functools.partial"
        )
    positional = [p for p in named if p.kind is not p.KEYWORD_ONLY]
    return len(required) == 1 or (has_config and len(positional) == 1)


def warn_of_unused_config(takes_config: bool, config: object) -> None:
    """Warn if there is a config, but the training function does not take one."""
    if config and not takes_config:
        content = ", ".join(map(repr, config)) if isinstance(config, Mapping) else repr(config)
        warn_caller(
            f"train_loop_config has {content}, but the training function takes no argument, so it "
            "does not receive the config. Define it as `def train(config):`"
        )


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


def check_json_dict(name: str, value: Mapping[str, object] | None) -> dict[str, object]:
    """Return an argument as a dict after checking that it is JSON-serializable.

    Raises:
        TypeError: The argument is not a dict, or not JSON-serializable.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, found {value!r}")
    try:
        json.dumps(dict(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be JSON-serializable: {error}") from error
    return dict(value)


def check_not_detached(config: RunConfig) -> None:
    """Reject `detached=True` for a run in this process.

    Raises:
        ValueError: The run is detached.
    """
    if config.detached:
        raise ValueError(
            "RunConfig.detached=True needs workers that outlive this process, but "
            "ScalingConfig.num_workers=0 runs the function in this process. Set num_workers=1"
        )


def check_storage_path(path: Path) -> None:
    """Check that a run can write to a local directory, and create it if needed.

    A small file is written, synced, and deleted.

    Raises:
        OSError: The directory cannot be written. The error has the subclass of the system's error
            (`PermissionError`, `NotADirectoryError`, ...). The message has the path, the user, and
            a remedy.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        _write_probe(path)
    except OSError as error:
        raise _make_unwritable_error(path, error) from None


def check_storage_before_start(directory: RunDirectory) -> None:
    """Check that a run can be stored, without creating its directory if it is local.

    The remote storage, or the closest existing parent of a local directory, is written to.

    Raises:
        OSError: The storage cannot be written; see `check_storage_path`.
    """
    if directory.remote_path is not None:
        directory.run_files.check_writable()
        return
    path = directory.local_path
    parent = next(parent for parent in (path, *path.parents) if os.path.lexists(parent))
    try:
        _write_probe(parent)
    except OSError as error:
        raise _make_unwritable_error(path, error) from None


def _write_probe(path: Path) -> None:
    with tempfile.NamedTemporaryFile(dir=path, prefix=".drawbar-probe-") as probe:
        probe.write(bytes(4096))
        probe.flush()
        os.fsync(probe.fileno())  # a full disk may show only now


def _make_unwritable_error(path: Path, error: OSError) -> OSError:
    return OSError(
        error.errno,
        f"storage_path={str(path)!r} cannot be written by user {_get_user_name()}: "
        f"{error.strerror}; {_suggest_fix(error.errno)}",
    )


def _suggest_fix(number: int | None) -> str:
    if number in (errno.EEXIST, errno.ENOTDIR):
        return "the path or a part of it is a file, so choose a directory"
    if number in (errno.ENOSPC, errno.EDQUOT):
        return "free some space, or set RunConfig.storage_path to another disk"
    return "set RunConfig.storage_path to a directory that this user may write to"


def _get_user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a user ID without a name, in a container
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
