"""Capture the driver's environment and recreate it in workers.

Ray gives its workers the job's namespace and runtime environment, but starts them in another
directory, with another `sys.argv`, and without the driver's import path, logging setup, and
`ray.data.DataContext`.
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
from typing import Literal

from drawbar.train._ray_compat import current_data_context
from drawbar.train._serialization import Serialized, serialize, serialize_without_references

_EXCLUDED_LOGGERS = ("ray", "drawbar")
_STREAM_DESCRIPTORS = {"stdout": 1, "stderr": 2}
_MAX_CELL_CHARS = 1_000_000


@dataclass(frozen=True, kw_only=True)
class DriverEnvironment:
    """Environment of a driver: directory, import path, arguments, logging, and contexts.

    Attributes:
        working_directory: Working directory. Ignored on nodes that have no such directory.
        sys_path: `sys.path` of the driver.
        argv: `sys.argv` of the driver.
        logging_setup: Levels and handlers set by `logging.basicConfig` and similar functions.
        data_context: Serialized `DataContext`; None if the driver has not changed it.
        tune_trial: Trial of Ray Tune in which the driver runs, if any.
        notebook_cells: Source of notebook cells, by the file names in their code objects.
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
        """Return the environment of this process."""
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
        """Recreate the environment in this process. On exit, restore arguments and contexts."""
        with contextlib.suppress(OSError):
            os.chdir(self.working_directory)
        # Append: modules of the worker's runtime environment take precedence over the driver's.
        sys.path += [path for path in self.sys_path if path not in sys.path]
        argv, sys.argv = sys.argv, list(self.argv)
        for name, source in self.notebook_cells.items():  # for source lines in tracebacks
            linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
        try:
            with contextlib.ExitStack() as undo:
                if self.data_context is not None:
                    undo.enter_context(current_data_context(self.data_context.deserialize()))
                undo.enter_context(self.logging_setup.apply())
                yield
        finally:
            sys.argv = argv


@dataclass(frozen=True, kw_only=True)
class TuneTrial:
    """A trial of Ray Tune.

    Attributes:
        name: Name of the trial.
        id: Id by which Tune identifies the trial.
        directory: Directory of the trial.
        placement_group_factory: Serialized `ray.tune.PlacementGroupFactory`, so that only processes
            that use it import Ray Tune.
    """

    name: str
    id: str
    directory: str
    placement_group_factory: Serialized


_tune_trials: list[TuneTrial] = []


def set_tune_trial(*, name: str, id: str, directory: str, resources: object) -> None:
    """Assign the runs that start in this process from now on to a trial of Ray Tune.

    Args:
        name: Name of the trial.
        id: Id by which Tune identifies the trial.
        directory: Directory of the trial.
        resources: Its `ray.tune.PlacementGroupFactory`.

    Example:
        set_tune_trial(name="a", id="1", directory=path, resources=PlacementGroupFactory([{}]))
    """
    _tune_trials[:] = [
        TuneTrial(
            name=name, id=id, directory=directory, placement_group_factory=serialize(resources)
        )
    ]


@dataclass(frozen=True, kw_only=True)
class LoggingSetup:
    """Logging setup: levels of all loggers, and stream handlers of the root logger."""

    level: int
    levels: dict[str, int]
    handlers: tuple[_HandlerSettings, ...]

    @classmethod
    def capture(cls) -> LoggingSetup:
        """Return the setup of this process. Other handlers, such as for files, are not included."""
        root = logging.getLogger()
        loggers = {
            name: logger for name, logger in root.manager.loggerDict.items() if _has_level(logger)
        }
        return cls(
            level=root.level,
            levels={
                name: logger.level
                for name, logger in loggers.items()
                if isinstance(logger, logging.Logger)
                and name.split(".")[0] not in _EXCLUDED_LOGGERS
            },
            handlers=tuple(filter(None, map(_HandlerSettings.from_handler, root.handlers))),
        )

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Apply the setup in this process, unless the process has another one.

        The process may have one from `ray.init(logging_config=...)` or a
        `worker_process_setup_hook`. Its handlers are then redirected to the current streams.
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
                for settings in self.handlers:
                    handler = settings.build()
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
        """Return the settings of a handler, None if it is of another type or cannot be pickled."""
        if type(handler) is not logging.StreamHandler:
            return None
        with contextlib.suppress(Exception):  # a formatter that cannot be pickled
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
        """Create the handler in this process."""
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
    """Redirect handlers of this process's output streams to `sys.stdout` or `sys.stderr`."""
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
    """Return the source of IPython cells, which is in no file; at most the latest megabyte."""
    if "IPython" not in sys.modules:
        return {}
    cells: dict[str, str] = {}
    for name, entry in reversed(list(linecache.cache.items())):
        is_cell = name.startswith("<ipython-input-") or f"ipykernel_{os.getpid()}" in name
        if is_cell and len(entry) == 4 and sum(map(len, cells.values())) < _MAX_CELL_CHARS:
            cells[name] = "".join(entry[2])
    return cells


def _capture_data_context() -> Serialized | None:
    """Return the changed `DataContext`, None if it has its defaults.

    With None, workers need not import Ray Data.
    """
    if "ray.data.context" not in sys.modules:
        return None  # A process that has not imported Ray Data has not changed the context.
    from ray.data import DataContext

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Ray Data warns about its own defaults.
        context = DataContext.get_current()
        default = DataContext()
    is_default = serialize_without_references(context) == serialize_without_references(default)
    return None if is_default else serialize(context)
