"""Configuration of a run: storage, checkpoints, callbacks, and console output.

All classes are frozen. Their constructors raise `ValueError` or `TypeError` for invalid arguments,
so that mistakes are reported at the user's line before a process starts.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime, timedelta
from functools import partial
from pathlib import PurePath
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from drawbar._base import fields
from drawbar._base.metrics import Metrics
from drawbar._base.time_limits import check_max_time, check_stop_before
from drawbar._health.health_config import HealthConfig, HealthDecision
from drawbar._records.checkpoint_config import CheckpointConfig
from drawbar._recovery.failure_config import FailureConfig
from drawbar._recovery.resume import ResumeMode
from drawbar._storage.filesystem import AnyFileSystem

if TYPE_CHECKING:
    from drawbar._process.errors import PreemptionInfo
    from drawbar._storage.checkpoint import Checkpoint
    from drawbar.train._config.scaling_config import ScalingConfig
    from drawbar.train.events import Event


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Description of the run that a callback observes.

    Attributes:
        name: Name of the run.
        run_id: Unique id of the run, the same after a resume.
        path: Path or URI of the run directory.
        scaling_config: Scaling configuration of the run.
        run_config: Run configuration of the run.

    Example:
        ```python
        class PrintRun(UserCallback):
            def after_report(self, run_context, metrics, checkpoint):
                print(run_context.name, run_context.path, metrics[0])
        ```
    """

    name: str
    run_id: str
    path: str
    scaling_config: ScalingConfig
    run_config: RunConfig


@dataclass(frozen=True, kw_only=True)
class AttemptInfo:
    """Description of an attempt whose workers have started.

    Attributes:
        attempt: Number of the attempt, from 0. It continues after a resume.
        num_workers: Number of workers of this attempt.
        first_report_index: Number of the first report of this attempt. The attempt replaces
            reports of earlier attempts with this number or a higher one.
        resume_checkpoint: Path or URI of the checkpoint from which the attempt resumes; None if it
            starts from the beginning.

    Example:
        ```python
        class PrintRestart(UserCallback):
            def on_attempt_start(self, run_context, attempt):
                if attempt.attempt > 0:
                    print("resumed from", attempt.resume_checkpoint)
        ```
    """

    attempt: int
    num_workers: int
    first_report_index: int
    resume_checkpoint: str | None = None


@dataclass(frozen=True, kw_only=True)
class RunEndInfo:
    """Outcome of a run, as a callback receives it.

    Attributes:
        status: "finished", "failed", or "stopped".
        error: Error message of a failed run, else "".

    Example:
        ```python
        class Notify(UserCallback):
            def on_run_end(self, run_context, info):
                print(f"{run_context.name}: {info.status} {info.error}")
        ```
    """

    status: str
    error: str = ""


class UserCallback:
    """Base class of callbacks that observe a run.

    Pass instances as `RunConfig(callbacks=[...])`. The methods are called in the controller's
    process in the order of events, one at a time, on a separate thread. A slow callback delays
    later callbacks but not training.

    Example:
        ```python
        class PrintLoss(UserCallback):
            def after_report(self, run_context, metrics, checkpoint):
                print(f"{run_context.name}: loss {metrics[0]['loss']:.3f}")

        trainer = DataParallelTrainer(train_func, run_config=RunConfig(callbacks=[PrintLoss()]))
        ```
    """

    def check_run_config(self, run_config: RunConfig) -> None:
        """Check the configuration of a run. `RunConfig` calls this before anything starts.

        Args:
            run_config: Configuration that has this callback.

        Raises:
            ValueError: The callback cannot be used with the configuration.
        """

    def on_run_start(self, run_context: RunContext) -> None:
        """Handle the start of the run, once per `fit()`. A resume calls it again.

        The start may add events to the journal, which `on_event` does not receive: for example, a
        checkpoint that an earlier driver committed just before it was killed. Read them with
        `drawbar.train.runs.find_run(run_context.path).list_events()`.

        Args:
            run_context: The run. `run_id` is the same after a resume.
        """

    def on_attempt_start(self, run_context: RunContext, attempt: AttemptInfo) -> None:
        """Handle the start of an attempt: all workers are running.

        It is not called for an attempt whose workers do not start.

        Args:
            run_context: The run.
            attempt: Number of the attempt, and the checkpoint from which it resumes.
        """

    def after_report(
        self,
        run_context: RunContext,
        metrics: list[Metrics],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Handle a complete round: every rank has reported, and the checkpoint is committed.

        Args:
            run_context: The run.
            metrics: Metrics of every rank, in rank order.
            checkpoint: Committed checkpoint of the round, None if no rank saved one.
        """

    def on_preemption(self, run_context: RunContext, info: PreemptionInfo) -> None:
        """Handle the notice that nodes of the run will be preempted.

        Args:
            run_context: The run.
            info: Affected nodes and ranks, and the deadline if it is known.
        """

    def after_exception(
        self, run_context: RunContext, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Handle a failed attempt, whether or not the run restarts.

        Args:
            run_context: The run.
            worker_exceptions: Exceptions by rank.
        """

    def after_health_decision(
        self, run_context: RunContext, health_decision: HealthDecision
    ) -> None:
        """Handle a decision of the health checks, other than a `Noop`, before Drawbar acts on it.

        Args:
            run_context: The run.
            health_decision: A `Reattempt`, `Evict`, or `Diagnose` of `drawbar.train.health`.
        """

    def on_run_end(self, run_context: RunContext, info: RunEndInfo) -> None:
        """Handle the end of the run. It is not called if the driver is killed.

        `fit()` returns after this call. `drawbar.train.runs.find_run(run_context.path)` reads all
        metrics and checkpoints of the run.

        Args:
            run_context: The run.
            info: Outcome of the run.
        """

    def on_event(self, run_context: RunContext, event: Event) -> None:
        """Handle one of the events in `drawbar.train.events`.

        These are reports, checkpoints, failures, stalls, and resource samples. There can be
        thousands of events per second.

        Args:
            run_context: The run.
            event: One of the types in `drawbar.train.events`. Ignore types that you do not know.
        """


_MAX_NAME_BYTES = 255  # bytes, in all usual file systems


def _check_log_level(name: str, value: Any) -> str:
    level: str = fields.require_type(name, value, str)
    fields.require_choice(name, level.upper(), ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"))
    return level


@dataclass(frozen=True, repr=False)
class LoggingConfig(fields.ConfigRepr):
    """Console output of a run. The files in `<run>/logs` always contain everything.

    Args:
        log_level: "INFO" shows progress, the output of rank 0, and all errors. "WARNING" omits
            progress. "ERROR" also omits the output of rank 0.

    Raises:
        TypeError: `log_level` is not a string.
        ValueError: `log_level` is not the name of a level of `logging`.

    Example:
        >>> RunConfig(logging_config=LoggingConfig("WARNING"))
        RunConfig(logging_config=LoggingConfig(log_level='WARNING'))
    """

    log_level: Annotated[str, _check_log_level] = "INFO"

    @property
    def level_number(self) -> int:
        """Numeric level, as in `logging`."""
        return logging.getLevelNamesMapping()[self.log_level.upper()]


def _check_run_name(name: str, value: Any) -> str:
    """Check that a run name is a relative path of valid directory names."""
    path = PurePath(fields.require_type(name, value, str))
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(
            f"{name}={value!r} would leave the storage path; "
            "give a plain name, and set the directory with storage_path="
        )
    if not value.strip() or value in (".", "./") or re.search(r"[\x00-\x1f]", value):
        raise ValueError(f"{name}={value!r} is not a valid directory name")
    if (length := max(len(os.fsencode(part)) for part in path.parts)) > _MAX_NAME_BYTES:
        raise ValueError(
            f"{name}={value[:20] + '...'!r} has {length} bytes; a directory name has at "
            f"most {_MAX_NAME_BYTES}"
        )
    return str(value)


def _check_storage_path(name: str, value: Any) -> str | os.PathLike[str]:
    if not os.fspath(fields.require_type(name, value, (str, os.PathLike))):
        raise ValueError(f"{name} must not be empty; None is the default")
    path: str | os.PathLike[str] = value
    return path


def _check_callbacks(name: str, value: Any) -> tuple[UserCallback, ...]:
    description = "a list of instances of drawbar.train.UserCallback"
    try:
        callbacks: tuple[UserCallback, ...] = fields.list_of(UserCallback, description)(
            name, () if value is None else value
        )
    except TypeError as error:
        raise TypeError(f"{error}{_suggest_callback(value)}") from None
    return callbacks


@dataclass(frozen=True, repr=False)
class RunConfig(fields.ConfigRepr):
    """Storage of a run, its failure handling, checkpoints, callbacks, and logging.

    Args:
        name: Name of the run directory below the storage path; may contain directories, such as
            "mnist/first". Default: date, time, and six random hexadecimal digits.
        storage_path: Directory or URI in which runs are stored: a local or shared path, or a URI
            that pyarrow or fsspec supports, such as `s3://bucket/path`. Default: the environment
            variable DRAWBAR_STORAGE, `storage_path` in `~/.config/drawbar/config.toml`, or
            `~/drawbar_results`.
        storage_filesystem: A `pyarrow.fs.FileSystem` or fsspec filesystem for `storage_path`, which
            then needs no scheme.
        failure_config: Failure handling; see `FailureConfig`.
        checkpoint_config: Retention and durability; see `CheckpointConfig`.
        callbacks: Callbacks that observe the run; see `UserCallback`.
        worker_runtime_env: Ray runtime environment of the worker processes.
        logging_config: Console output; see `LoggingConfig`.
        forward_env: Names or patterns (such as "MY_*") of environment variables that workers
            receive from the driver in addition to the default ones.
        resume: Whether to resume an existing run of this name. "auto" resumes from its latest
            checkpoint, but raises an error if the run has finished with another training function.
            "never" raises an error if the run exists. "must" raises an error if there is no run or
            no checkpoint.
        detached: Whether the run outlives the driver. An actor on the driver's node then controls
            the run and calls the callbacks, and `drawbar.train.attach` returns a handle to it in
            any process of the cluster.
        secret_keys: Keys in `train_loop_config`, at any depth, whose values are redacted in the
            journal and on the console, in addition to keys that look like secrets (`hf_token`).
        forkserver_preload: Modules, such as `["torch"]`, that a server process on each node imports
            once, to fork workers that have them. Default: the environment variable
            `DRAWBAR_FORKSERVER_PRELOAD`, such as `torch,transformers`. If it is not set: modules
            that the function has imported in earlier workers of this driver, if they are known to
            survive a fork. Linux only.
        max_time: Time in seconds, or a timedelta, after which the run stops as with
            `RunHandle.stop()`: after a checkpoint, which integrations save at the next step. It
            counts from the start of `fit()` and includes restarts. A resumed run has the full time
            again.
        stop_before: Time at which the run stops in the same way. A timedelta or a number of seconds
            counts back from the end of the driver's Slurm job (`SLURM_JOB_END_TIME`); outside a
            job, it has no effect but a warning. A datetime is an absolute time, which is local
            unless it has a time zone. Leave enough time for a step and a checkpoint.
        health_config: Checks of the nodes before the start and during the run, on Ray; see
            `drawbar.train.health.HealthConfig`. Default: none.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `name`, `storage_path`, `resume`, `max_time`, or `stop_before` is invalid.

    Example:
        >>> RunConfig(name="mnist", failure_config=FailureConfig(max_failures=3))
        RunConfig(name='mnist', failure_config=FailureConfig(max_failures=3))
    """

    _replacements: ClassVar[Mapping[str, str]] = {
        "verbose": 'logging_config=LoggingConfig("WARNING") shows less, "ERROR" even less',
        "log_to_file": "leave it out: the output of every rank is in <run>/logs",
        "progress_reporter": "leave it out: the console shows the progress, and callbacks=[...] "
        "receive every report",
        "stop": "return from the training function when it is time, or call RunHandle.stop()",
        "sync_config": "leave it out: Drawbar uploads checkpoints, the journal, and logs",
        "local_dir": "write storage_path=",
    }

    name: Annotated[str | None, _check_run_name] = None
    storage_path: Annotated[str | os.PathLike[str] | None, _check_storage_path] = None
    storage_filesystem: AnyFileSystem | None = None
    # None selects the default, as in Ray Train.
    failure_config: Annotated[FailureConfig, partial(fields.resolve_config, kind=FailureConfig)] = (
        field(default_factory=FailureConfig)
    )
    checkpoint_config: Annotated[
        CheckpointConfig, partial(fields.resolve_config, kind=CheckpointConfig)
    ] = field(default_factory=CheckpointConfig)
    callbacks: Annotated[Sequence[UserCallback], _check_callbacks] = ()
    worker_runtime_env: Mapping[str, object] | None = None
    logging_config: Annotated[LoggingConfig, partial(fields.resolve_config, kind=LoggingConfig)] = (
        field(default_factory=LoggingConfig)
    )
    _: KW_ONLY
    forward_env: Annotated[
        Sequence[str], fields.list_of(str, "a list of names or patterns such as ['MY_*']")
    ] = ()
    resume: ResumeMode = "auto"
    detached: bool = False
    secret_keys: Annotated[
        Sequence[str],
        fields.list_of(str, "a list of keys of train_loop_config such as ['license']"),
    ] = ()
    forkserver_preload: Annotated[
        Sequence[str] | None, fields.list_of(str, "a list of modules such as ['torch']")
    ] = None
    max_time: Annotated[float | timedelta | None, check_max_time] = None
    stop_before: Annotated[datetime | float | timedelta | None, check_stop_before] = None
    health_config: HealthConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for callback in self.callbacks:
            callback.check_run_config(self)


def _suggest_callback(callbacks: object) -> str:
    """Return a hint for callbacks that only work with Ray's own trainers."""
    candidates = callbacks if isinstance(callbacks, list | tuple) else ()
    if any(type(item).__module__.startswith("ray.tune.integration") for item in candidates):
        return "; drawbar.tune.TuneReportCallback reports to Ray Tune"
    return ""
