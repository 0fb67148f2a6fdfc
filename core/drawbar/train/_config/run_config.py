"""How a run is configured. Every class here is frozen, checks itself, and touches nothing outside.

A mistake in a config is a `ValueError` or `TypeError` at the line that makes it, before a process
starts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, ClassVar, Literal, get_args

from drawbar.train._config.checks import (
    ConfigRepr,
    check_run_name,
    is_list_of,
    parse_duration,
    require_choice,
    require_int,
    require_type,
    warn_caller,
)
from drawbar.train._metrics import Metrics
from drawbar.train._storage.filesystem import AnyFileSystem

if TYPE_CHECKING:
    from drawbar.train._config.scaling_config import ScalingConfig
    from drawbar.train._messages import PreemptionInfo
    from drawbar.train._storage.checkpoint import Checkpoint


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """Which run a callback watches."""

    name: str
    run_id: str
    path: str
    scaling_config: ScalingConfig
    run_config: RunConfig


class UserCallback:
    """Subclass it and pass instances as `RunConfig(callbacks=[...])`.

    The methods are called in the process of the controller, one after the other in the order of
    events, on a thread of their own: a slow one delays later calls, never the training.
    """

    def after_report(
        self,
        run_context: RunContext,
        metrics: list[Metrics],
        checkpoint: Checkpoint | None,
    ) -> None:
        """Run when every rank has made its k-th report and its checkpoint, if any, is committed.

        `metrics` has one entry per rank, in rank order.
        """

    def on_preemption(self, run_context: RunContext, info: PreemptionInfo) -> None:
        """Run when nodes of this run are about to be taken away."""

    def after_exception(
        self, run_context: RunContext, worker_exceptions: dict[int, Exception]
    ) -> None:
        """Run when an attempt has failed, also if another one follows. Maps rank to exception."""


ResumeMode = Literal["auto", "never", "must"]
ScoreOrder = Literal["max", "min"]

# In the home, which outlives a reboot, and which the nodes of a cluster often share.
DEFAULT_STORAGE_PATH = "~/drawbar_results"


@dataclass(frozen=True, repr=False)
class FailureConfig(ConfigRepr):
    """What to do when workers fail. Mistakes in the configuration are never retried.

    Args:
        max_failures: How often the group may restart from the newest committed checkpoint after a
            worker failed; 0 never, -1 without limit.
        max_preemption_failures: How often workers may be lost with their nodes, counted apart; -1
            without limit.
        max_startup_failures: How often starting the workers may fail before the run fails; -1 is
            without limit. The delay before the next start doubles from 2 s up to 60 s.
        reuse_workers: Keep the processes of the workers that did not fail, with their imports and
            `get_context().cache`, when their backend allows it and they stop within a second.
        hang_timeout: When no rank has said anything (report, collective, output) for so long, in
            seconds or as a timedelta, every rank's stacks are written to `<run>/stacks`, and the
            attempt fails with a `HangError` that names the odd rank out. It counts in
            `max_failures`. None waits without limit.
        stall_warning_after: When a rank has given no sign of life for so long while others wait
            for it, in
            seconds or as a timedelta, the console and `RunHandle.quiet_ranks` say so: which rank,
            where it stands, how to look further. The run goes on. None says nothing.
        controller_failure_limit: Ray Train's name of `max_startup_failures`.
        relax_collectives_on_preemption: Of Ray Train; changes nothing here, and says so.
        preemption_grace_s: Of Ray Train; changes nothing here, and says so.
    """

    _replacements: ClassVar[Mapping[str, str]] = {
        "fail_fast": "max_failures=0, the default, ends the run with its first failure"
    }

    max_failures: int = 0
    _: KW_ONLY
    # Nodes that go say nothing of the function, which will run elsewhere: no limit.
    max_preemption_failures: int = -1
    # A node may be lost between placing and starting; what is wrong for good fails three times.
    max_startup_failures: int = 2
    reuse_workers: bool = True
    # A long epoch is as silent as a hang, and only its user knows how long one may be. So by
    # default it is said, and nothing is ended.
    hang_timeout: float | timedelta | None = None
    stall_warning_after: float | timedelta | None = timedelta(seconds=30)
    controller_failure_limit: InitVar[int | None] = None
    relax_collectives_on_preemption: InitVar[bool] = False
    preemption_grace_s: InitVar[float] = 0.0

    def __post_init__(
        self,
        controller_failure_limit: int | None,
        relax_collectives_on_preemption: bool,
        preemption_grace_s: float,
    ) -> None:
        if controller_failure_limit is not None:
            object.__setattr__(self, "max_startup_failures", controller_failure_limit)
        if relax_collectives_on_preemption or preemption_grace_s:
            warn_caller(
                "FailureConfig(relax_collectives_on_preemption=, preemption_grace_s=) change "
                "nothing: ranks whose nodes are taken away are waited for while they live; the run "
                "goes on elsewhere once a checkpoint is committed, or they are gone"
            )
        for name in ("max_failures", "max_preemption_failures", "max_startup_failures"):
            require_int(f"FailureConfig.{name}", getattr(self, name), at_least=-1)
        self._check_duration("hang_timeout", none_means="waits without limit")
        self._check_duration("stall_warning_after", none_means="says nothing")
        require_type("FailureConfig.reuse_workers", self.reuse_workers, bool)

    def _check_duration(self, field_name: str, none_means: str) -> None:
        name, timeout = f"FailureConfig.{field_name}", getattr(self, field_name)
        if timeout is None:
            return
        seconds = parse_duration(name, timeout, none_meaning=none_means)
        # Frozen for users: what they gave in either form has one from here on.
        object.__setattr__(self, field_name, timedelta(seconds=seconds))


_SAVING_ADVICE = (
    "a checkpoint is made whenever the function calls report(checkpoint=...); the report callbacks "
    "of the integrations have their own options, such as RayTrainReportCallback(frequency=10)"
)


@dataclass(frozen=True, repr=False)
class CheckpointConfig(ConfigRepr):
    """Which checkpoints stay, and how safe a committed one is.

    Args:
        num_to_keep: Keep this many of the best; None keeps all. The newest always stays too, since
            a restart begins there.
        checkpoint_score_attribute: The reported metric that ranks checkpoints; nested keys are
            joined with "/". None ranks by age, newest best. A checkpoint without the metric, or
            with NaN, ranks last; as long as none has it, the console says so and none is deleted.
        checkpoint_score_order: "max" if a higher score is better, "min" if a lower one is.
        durable: Also survive a power cut, by fsync of each file and folder before the commit.
            Without it a committed checkpoint survives the death of any process.
    """

    _replacements: ClassVar[Mapping[str, str]] = {
        "checkpoint_frequency": _SAVING_ADVICE,
        "checkpoint_at_end": _SAVING_ADVICE,
    }

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: ScoreOrder = "max"
    _: KW_ONLY
    durable: bool = False

    def __post_init__(self) -> None:
        if self.num_to_keep is not None:
            require_int("CheckpointConfig.num_to_keep", self.num_to_keep, at_least=1)
        if self.checkpoint_score_attribute is not None:
            name = "CheckpointConfig.checkpoint_score_attribute"
            require_type(name, self.checkpoint_score_attribute, str)
        require_choice(
            "CheckpointConfig.checkpoint_score_order",
            self.checkpoint_score_order,
            get_args(ScoreOrder),
        )
        require_type("CheckpointConfig.durable", self.durable, bool)


@dataclass(frozen=True, repr=False)
class LoggingConfig(ConfigRepr):
    """What a run shows on the driver's console. The files under `<run>/logs` always get everything.

    Args:
        log_level: "INFO" shows the run's progress, rank 0's output and all errors; "WARNING" leaves
            the progress out; "ERROR" leaves rank 0's output out too.
    """

    log_level: str = "INFO"

    def __post_init__(self) -> None:
        require_type("LoggingConfig.log_level", self.log_level, str)
        levels = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
        require_choice("LoggingConfig.log_level", self.log_level.upper(), levels)

    @property
    def level_number(self) -> int:
        """The level as the number that `logging` uses."""
        return logging.getLevelNamesMapping()[self.log_level.upper()]


@dataclass(frozen=True, repr=False)
class RunConfig(ConfigRepr):
    """Where a run lies and how it is kept going.

    Args:
        name: Name of the run's directory. Default: the date, time and six random hex digits.
            Folders in it, such as "mnist/first", are below the storage path.
        storage_path: Where runs lie: a local or shared path, or a URI that pyarrow or fsspec knows,
            such as `s3://bucket/folder`. Default `~/drawbar_results`.
        storage_filesystem: A `pyarrow.fs.FileSystem`, or one of fsspec, that `storage_path` lies
            on; the path then needs no scheme.
        failure_config: Restarts; see `FailureConfig`.
        checkpoint_config: Retention and durability; see `CheckpointConfig`.
        callbacks: Observers of the run; see `UserCallback`.
        worker_runtime_env: Ray runtime environment of the worker processes.
        logging_config: What the console shows; see `LoggingConfig`.
        forward_env: Names of environment variables, or patterns such as "MY_*", that the workers
            get from the driver besides the documented default set.
        resume: What to do if the run directory already holds a run. "auto": resume from its latest
            checkpoint, but raise an error if the run has finished with another training function.
            "never": raise an error. "must": always resume, and raise an error if there is no run or
            no checkpoint.
        detached: The run outlives the driver: it is hosted in an actor, and `drawbar.train.attach`
            finds it by its name from any process on the cluster. Callbacks then run in that actor.
        secrets: Names of keys in `train_loop_config`, at any depth, whose values are not written to
            the journal nor shown, besides those that look like secrets, as `hf_token` does.
    """

    _replacements: ClassVar[Mapping[str, str]] = {
        "verbose": 'logging_config=LoggingConfig("WARNING") shows less, "ERROR" less still',
        "log_to_file": "leave it out: the output of every rank is in <run>/logs",
        "progress_reporter": "leave it out: the console shows the progress, and callbacks=[...] "
        "hear of every report",
        "stop": "return from the training function when it is time, or call RunHandle.stop()",
        "sync_config": "leave it out: report() uploads checkpoints, the run its journal and logs",
        "local_dir": "write storage_path=",
    }

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_filesystem: AnyFileSystem | None = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    callbacks: Sequence[UserCallback] = ()
    worker_runtime_env: Mapping[str, object] | None = None
    logging_config: LoggingConfig = field(default_factory=LoggingConfig)
    _: KW_ONLY
    forward_env: Sequence[str] = ()
    resume: ResumeMode = "auto"
    detached: bool = False
    secret_keys: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name, kind in (
            ("failure_config", FailureConfig),
            ("checkpoint_config", CheckpointConfig),
            ("logging_config", LoggingConfig),
        ):
            if getattr(self, name) is None:
                object.__setattr__(self, name, kind())
            require_type(f"RunConfig.{name}", getattr(self, name), kind)
        if self.name is not None:
            check_run_name(self.name)
        if self.storage_path is not None:
            require_type("RunConfig.storage_path", self.storage_path, (str, os.PathLike))
            if not os.fspath(self.storage_path):
                raise ValueError("RunConfig.storage_path must not be empty; None is the default")
        require_choice("RunConfig.resume", self.resume, get_args(ResumeMode))
        require_type("RunConfig.detached", self.detached, bool)
        if not is_list_of(str, self.secret_keys):
            raise TypeError(
                "RunConfig.secrets must be a list of keys of train_loop_config such as "
                f"['license'], found {self.secret_keys!r}"
            )
        if not is_list_of(str, self.forward_env):
            raise TypeError(
                "RunConfig.forward_env must be a list of names or patterns such as ['MY_*'], "
                f"found {self.forward_env!r}"
            )
        if self.worker_runtime_env is not None:
            require_type("RunConfig.worker_runtime_env", self.worker_runtime_env, Mapping)
        self._check_callbacks()

    def _check_callbacks(self) -> None:
        callbacks = () if self.callbacks is None else self.callbacks
        if not is_list_of(UserCallback, callbacks):
            raise TypeError(
                "RunConfig.callbacks must be a list of instances of drawbar.train.UserCallback, "
                f"found {callbacks!r}{_suggest_callback(callbacks)}"
            )
        object.__setattr__(self, "callbacks", tuple(callbacks))


def _suggest_callback(callbacks: object) -> str:
    """Say what to write in the place of a callback that Ray brings for its own trainers."""
    found = callbacks if isinstance(callbacks, list | tuple) else ()
    if any(type(each).__module__.startswith("ray.tune.integration") for each in found):
        return "; drawbar.tune.TuneReportCallback reports to Ray Tune"
    return ""
