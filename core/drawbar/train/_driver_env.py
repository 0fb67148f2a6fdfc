"""What code finds around it in the driver, and finds again in the run's other processes.

Ray gives its workers the job's namespace and runtime environment. It starts them in a folder of its
own, with its own `sys.argv`, without the driver's import path, and tells them nothing of the
driver's logging and of its `ray.data.DataContext`.
"""

from __future__ import annotations

import contextlib
import linecache
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from drawbar.train._serialization import Serialized, serialize, serialize_without_references

if TYPE_CHECKING:
    from ray.data import DataContext

_EXCLUDED_LOGGERS = ("ray", "drawbar")
_STREAM_DESCRIPTORS = {"stdout": 1, "stderr": 2}
_MAX_CELL_CHARS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class DriverEnvironment:
    """Those of a driver.

    Attributes:
        working_directory: Where it was. A node that has no such folder does without.
        import_paths: Its `sys.path`.
        argv: Its `sys.argv`.
        logging: What `logging.basicConfig` and its like have set.
        data_context: Its `DataContext`, packed; None if it has changed nothing there.
        trial: The trial of Ray Tune that it runs in, if it does.
        cells: The source of a notebook's cells, by the file names that their code has.
    """

    working_directory: str
    sys_path: tuple[str, ...]
    argv: tuple[str, ...]
    logging_setup: LoggingSetup
    data_context: Serialized | None
    tune_trial: TuneTrial | None
    notebook_cells: dict[str, str]

    @classmethod
    def capture(cls) -> DriverEnvironment:
        """Give those of this process."""
        return cls(
            working_directory=os.getcwd(),
            sys_path=tuple(sys.path),
            argv=tuple(sys.argv),
            logging_setup=LoggingSetup.capture(),
            data_context=_capture_data_context(),
            tune_trial=next(iter(_tune_trials), None),
            notebook_cells=_collect_cells(),
        )

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Have them in this process; at the end, arguments and logging are as they were."""
        with contextlib.suppress(OSError):
            os.chdir(self.working_directory)
        # At the end: what the worker finds by its runtime environment goes before the driver's.
        sys.path += [path for path in self.sys_path if path not in sys.path]
        argv, sys.argv = sys.argv, list(self.argv)
        for name, source in self.notebook_cells.items():  # where tracebacks look for lines
            linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        try:
            if self.data_context is not None:
                _set_data_context(self.data_context.deserialize())
            with self.logging_setup.apply():
                yield
        finally:
            sys.argv = argv


@dataclass(frozen=True, kw_only=True)
class TuneTrial:
    """A trial of Ray Tune.

    Attributes:
        name: What Tune calls it.
        id: By which Tune tells it from others.
        directory: Where it lies.
        resources: Its `ray.tune.PlacementGroupFactory`, packed: who does not ask for it need not
            import Ray Tune.
    """

    name: str
    id: str
    directory: str
    placement_group_factory: Serialized


_tune_trials: list[TuneTrial] = []


def set_tune_trial(*, name: str, id: str, directory: str, resources: object) -> None:
    """Have the runs that start in this process from now on be those of a trial of Ray Tune.

    Args:
        name: What Tune calls it.
        id: By which Tune tells it from others.
        directory: Where it lies.
        resources: Its `ray.tune.PlacementGroupFactory`.
    """
    _tune_trials[:] = [
        TuneTrial(
            name=name, id=id, directory=directory, placement_group_factory=serialize(resources)
        )
    ]


@dataclass(frozen=True, kw_only=True)
class LoggingSetup:
    """Levels by the names of their loggers, and what the root logger writes to the two streams."""

    level: int
    levels: dict[str, int]
    handlers: tuple[_HandlerSettings, ...]

    @classmethod
    def capture(cls) -> LoggingSetup:
        """Give that of this process. Handlers of other kinds, such as files, are the driver's."""
        root = logging.getLogger()
        loggers = {name: each for name, each in root.manager.loggerDict.items() if _has_level(each)}
        return cls(
            level=root.level,
            levels={
                name: each.level
                for name, each in loggers.items()
                if isinstance(each, logging.Logger) and name.split(".")[0] not in _EXCLUDED_LOGGERS
            },
            handlers=tuple(filter(None, map(_HandlerSettings.from_handler, root.handlers))),
        )

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Log so in this process, unless it has a setup of its own.

        That is `ray.init(logging_config=...)`, or a `worker_process_setup_hook`: its handlers then
        follow the streams to where these go now.
        """
        root = logging.getLogger()
        with contextlib.ExitStack() as undo:
            if root.handlers:
                _redirect_handlers(root.handlers, undo)
            else:
                _set_level(root, self.level, undo)
                for name, level in self.levels.items():
                    if not _has_level(logger := logging.getLogger(name)):
                        _set_level(logger, level, undo)
                for each in self.handlers:
                    handler = each.build()
                    root.addHandler(handler)
                    undo.callback(root.removeHandler, handler)
            yield


@dataclass(frozen=True, kw_only=True)
class _HandlerSettings:
    """A handler of the root logger that writes to a standard stream."""

    stream: Literal["stdout", "stderr"]
    level: int
    formatter: Serialized

    @classmethod
    def from_handler(cls, handler: logging.Handler) -> _HandlerSettings | None:
        """Give it; None for a handler of another kind, or one that cannot be sent."""
        if type(handler) is not logging.StreamHandler:
            return None
        with contextlib.suppress(Exception):  # a formatter that does not pickle
            if handler.stream in (sys.stdout, sys.__stdout__):
                return cls(
                    stream="stdout", level=handler.level, formatter=serialize(handler.formatter)
                )
            if handler.stream in (sys.stderr, sys.__stderr__):
                return cls(
                    stream="stderr", level=handler.level, formatter=serialize(handler.formatter)
                )
        return None

    def build(self) -> logging.Handler:
        handler = logging.StreamHandler(getattr(sys, self.stream))
        handler.setLevel(self.level)
        handler.setFormatter(self.formatter.deserialize())
        return handler


def _has_level(logger: object) -> bool:
    return isinstance(logger, logging.Logger) and logger.level != logging.NOTSET


def _set_level(logger: logging.Logger, level: int, undo: contextlib.ExitStack) -> None:
    undo.callback(logger.setLevel, logger.level)
    logger.setLevel(level)


def _redirect_handlers(handlers: list[logging.Handler], undo: contextlib.ExitStack) -> None:
    """Have handlers that write to this process's output write to `sys.stdout` or `sys.stderr`."""
    for handler in handlers:
        if not isinstance(handler, logging.StreamHandler):
            continue
        for name, descriptor in _STREAM_DESCRIPTORS.items():
            with contextlib.suppress(OSError, ValueError, AttributeError):  # not a file
                if handler.stream.fileno() == descriptor:
                    undo.callback(handler.setStream, handler.stream)
                    handler.setStream(getattr(sys, name))
                    break


def _collect_cells() -> dict[str, str]:
    """Give the source of what was typed into IPython, the newest megabyte of it: no file has it."""
    if "IPython" not in sys.modules:
        return {}
    found: dict[str, str] = {}
    for name, entry in reversed(list(linecache.cache.items())):
        is_cell = name.startswith("<ipython-input-") or f"ipykernel_{os.getpid()}" in name
        if is_cell and len(entry) == 4 and sum(map(len, found.values())) < _MAX_CELL_CHARS:
            found[name] = "".join(entry[2])
    return found


def _capture_data_context() -> Serialized | None:
    """Give this process's, unless it is as it always is: a worker would import Ray Data for it."""
    # Whoever has not imported Ray Data has changed nothing there.
    context = getattr(sys.modules.get("ray.data.context"), "_default_context", None)
    if context is None:
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray Data warns of its own defaults
        untouched = type(context)()
    return (
        None
        if serialize_without_references(context) == serialize_without_references(untouched)
        else serialize(context)
    )


def _set_data_context(context: DataContext) -> None:
    from ray.data import DataContext

    DataContext._set_current(context)
