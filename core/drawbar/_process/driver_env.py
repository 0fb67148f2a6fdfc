"""Capture the driver's environment and recreate it in workers, with selected variables.

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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from drawbar._base.ray_compat import current_data_context
from drawbar._process.serialization import Serialized, serialize, serialize_without_references

_EXCLUDED_LOGGERS = ("ray", "drawbar")
_STREAM_DESCRIPTORS: dict[Literal["stdout", "stderr"], int] = {"stdout": 1, "stderr": 2}
_MAX_CELL_CHARS = 1_000_000

DEFAULT_FORWARDED_PATTERNS = (
    # Models, data sets and tokenizers
    *("HF_*", "HUGGINGFACE_*", "HUGGING_FACE_*", "TRANSFORMERS_*", "DATASETS_*", "TOKENIZERS_*"),
    # Experiment trackers
    *("WANDB_*", "MLFLOW_*", "COMET_*", "NEPTUNE_*", "CLEARML_*", "DATABRICKS_*", "TENSORBOARD_*"),
    # Storage and its credentials
    *("AWS_*", "GOOGLE_*", "GCS_*", "AZURE_*", "S3_*", "FSSPEC_*"),
    # Communication
    *("NCCL_*", "GLOO_*", "UCC_*", "UCX_*", "FI_*"),
    # Frameworks
    *("TORCH_*", "TORCHINDUCTOR_*", "TORCHDYNAMO_*", "PYTORCH_*", "TRITON_*", "CUDA_*", "CUBLAS_*"),
    *("CUDNN_*", "XLA_*", "JAX_*", "TF_*", "KERAS_*", "XGBOOST_*", "LIGHTGBM_*"),
    *("ACCELERATE_*", "FSDP_*", "DS_*", "DEEPSPEED_*", "LIGHTNING_*", "PL_*"),
    # Threads and seeds. PYTHONHASHSEED reaches only the worker's child processes.
    *("OMP_*", "MKL_*", "OPENBLAS_*", "NUMEXPR_*", "VECLIB_*", "PYTHONHASHSEED"),
)
"""Patterns of variables that workers receive; `RunConfig.forward_env` adds more."""

_EXCLUDED_PATTERNS = {
    "Ray assigns devices to each worker": (
        "*_VISIBLE_DEVICES",  # CUDA, NVIDIA, HIP, ROCR, ASCEND_RT, QBRUNTIME, TT
        "*_VISIBLE_CORES",  # NEURON_RT
        "*_VISIBLE_CHIPS",  # TPU
        "*_VISIBLE_MODULES",  # HABANA
        *("GPU_DEVICE_ORDINAL", "ONEAPI_DEVICE_SELECTOR", "ZE_AFFINITY_MASK"),
        *("FURIOSA_DEVICES", "RBLN_DEVICES"),
    ),
    "it describes a process of another run": ("DRAWBAR_*",),
    "it describes the driver's connection to Ray": ("RAY_*",),
    "Drawbar sets it for each worker by its rank": (
        *("RANK", "LOCAL_RANK", "NODE_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME"),
        *("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*", "TF_CONFIG"),
        "PET_*",  # options of torchrun, if the driver runs under it
    ),
    "Python reads it only at its start; send code with worker_runtime_env instead": (
        "PYTHONPATH",
        "PYTHONHOME",
    ),
}
"""Patterns of variables that workers never receive from the driver, by the reason."""


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
class DriverContext:
    """Variables and environment of a driver, for another process that starts runs in its place.

    Attributes:
        env_vars: Environment variables that workers receive.
        driver_env: Arguments, working directory, import path, logging, and `DataContext`.

    Example:
        ```python
        context = DriverContext.capture()

        @ray.remote
        def run_trial():
            with context.apply():
                trainer.fit()
        ```
    """

    env_vars: dict[str, str]
    driver_env: DriverEnvironment

    @classmethod
    def capture(cls, forward_env: Sequence[str] = ()) -> DriverContext:
        """Capture the context of this process.

        Args:
            forward_env: Names or patterns of additional variables, as for `RunConfig`.

        Returns:
            The context, which can be pickled.
        """
        return cls(
            env_vars=select_forwarded(os.environ, forward_env),
            driver_env=DriverEnvironment.capture(),
        )

    @contextlib.contextmanager
    def apply(self) -> Iterator[None]:
        """Recreate the captured context for runs that are started in this process.

        The environment variables stay set on exit.
        """
        os.environ.update(self.env_vars)
        with self.driver_env.apply():
            yield


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
        ```python
        set_tune_trial(name="a", id="1", directory=path, resources=PlacementGroupFactory([{}]))
        ```
    """
    factory = serialize(resources)
    trial = TuneTrial(name=name, id=id, directory=directory, placement_group_factory=factory)
    _tune_trials[:] = [trial]


def is_in_tune_trial() -> bool:
    """Return whether the runs that start in this process belong to a trial of Ray Tune."""
    return bool(_tune_trials)


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
        return cls(
            level=root.level,
            levels={
                name: logger.level
                for name, logger in root.manager.loggerDict.items()
                if isinstance(logger, logging.Logger)
                and logger.level != logging.NOTSET
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
                    logger = logging.getLogger(name)
                    if logger.level == logging.NOTSET:
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
            for name in _STREAM_DESCRIPTORS:
                if handler.stream in (getattr(sys, name), getattr(sys, f"__{name}__")):
                    formatter = serialize(handler.formatter)
                    return cls(stream=name, level=handler.level, formatter=formatter)
        return None

    def build(self) -> logging.Handler:
        """Create the handler in this process."""
        handler = logging.StreamHandler(getattr(sys, self.stream))
        handler.setLevel(self.level)
        handler.setFormatter(self.formatter.deserialize())
        return handler


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


def select_forwarded(
    environ: Mapping[str, str], extra_patterns: Sequence[str] = ()
) -> dict[str, str]:
    """Select the driver's environment variables that workers receive.

    If Ray started the driver (a Ray job, a task, or a Tune trial), OMP_NUM_THREADS was set by Ray
    and not by the user. It is then only forwarded if `extra_patterns` contains its exact name.

    Args:
        environ: Environment of the driver.
        extra_patterns: Names or patterns such as "MY_*" in addition to
            `DEFAULT_FORWARDED_PATTERNS`. Names that are not set in `environ` are ignored.

    Returns:
        Variables to forward.

    Raises:
        ValueError: `extra_patterns` names a variable that is never forwarded. A wider pattern that
            also matches one is allowed; that variable is omitted.
    """
    for name in extra_patterns:
        if (reason := get_exclusion_reason(name)) is not None:
            raise ValueError(
                f"RunConfig.forward_env names {name!r}, which is never forwarded: {reason}"
            )
    chosen = {
        name: value
        for name, value in environ.items()
        if _matches(name, (*DEFAULT_FORWARDED_PATTERNS, *extra_patterns))
        and get_exclusion_reason(name) is None
    }
    # Ray sets it in this process to the number of its CPUs (ray-project/ray#30496).
    if "RAY_RAYLET_PID" in environ and "OMP_NUM_THREADS" not in extra_patterns:
        chosen.pop("OMP_NUM_THREADS", None)
    return chosen


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def get_exclusion_reason(name: str) -> str | None:
    """Return why a variable is never forwarded, or None if it can be."""
    for reason, patterns in _EXCLUDED_PATTERNS.items():
        if _matches(name, patterns):
            return reason
    return None
