"""How a run is configured. Every class here is frozen, checks itself, and touches nothing outside.

A mistake in a config is a `ValueError` or `TypeError` at the line that makes it, before a process
starts.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Literal, get_args

from drawbar.train._callback import UserCallback
from drawbar.train._checks import (
    ShowsWhatWasSet,
    check_run_name,
    is_list_of,
    require_choice,
    require_int,
    require_type,
)
from drawbar.train._secrets import cleaned

Resume = Literal["auto", "never", "must"]
ScoreOrder = Literal["max", "min"]

DEFAULT_STORAGE_PATH = "~/drawbar_results"


def fields_of(config: Any) -> dict[str, Any]:
    """Give a config's fields as JSON-able values without secrets, for the journal."""
    plain = (str, int, float, bool, type(None))
    values = {item.name: getattr(config, item.name) for item in dataclasses.fields(config)}
    return {name: v if isinstance(v, plain) else cleaned(repr(v)) for name, v in values.items()}


@dataclass(frozen=True, kw_only=True, repr=False)
class FailureConfig(ShowsWhatWasSet):
    """What to do when workers fail. Mistakes in the configuration are never retried.

    Args:
        max_failures: How often the group may restart from the newest committed checkpoint after a
            worker failed; 0 never, -1 without limit.
        max_preemption_failures: How often workers may be lost with their nodes, counted apart; -1
            without limit.
        max_startup_failures: How often starting the workers may fail before the run does; -1
            without limit.
        keep_survivors: Keep the processes of the workers that did not fail, with their imports and
            `get_context().cache`, when their backend allows it and they stop within a second.
        hang_timeout: When no rank has said anything (report, collective, output) for so long, in
            seconds or as a timedelta, every rank's stacks are written to `<run>/stacks`, and the
            attempt fails with a `HangError` that names the odd rank out. It counts in
            `max_failures`. None waits without limit.
        quiet_notice: When a rank has given no sign of life for so long while others wait for it, in
            seconds or as a timedelta, the console and `RunHandle.quiet_ranks` say so: which rank,
            where it stands, how to look further. The run goes on. None says nothing.
    """

    max_failures: int = 0
    max_preemption_failures: int = -1
    max_startup_failures: int = 2
    keep_survivors: bool = True
    hang_timeout: float | timedelta | None = None
    quiet_notice: float | timedelta | None = timedelta(seconds=30)

    def __post_init__(self) -> None:
        for name in ("max_failures", "max_preemption_failures", "max_startup_failures"):
            require_int(f"FailureConfig.{name}", getattr(self, name), at_least=-1)
        self._check_duration("hang_timeout", none_means="waits without limit")
        self._check_duration("quiet_notice", none_means="says nothing")
        require_type("FailureConfig.keep_survivors", self.keep_survivors, bool)

    def _check_duration(self, field_name: str, none_means: str) -> None:
        name, timeout = f"FailureConfig.{field_name}", getattr(self, field_name)
        if timeout is None:
            return
        if isinstance(timeout, bool) or not isinstance(timeout, int | float | timedelta):
            raise TypeError(
                f"{name} must be a timedelta, seconds or None, "
                f"found {timeout!r} ({type(timeout).__name__})"
            )
        if isinstance(timeout, int | float):
            if not math.isfinite(timeout):
                raise ValueError(f"{name} must be finite, found {timeout}; None {none_means}")
            timeout = timedelta(seconds=timeout)
            object.__setattr__(self, field_name, timeout)
        if timeout <= timedelta(0):
            raise ValueError(f"{name} must be positive, found {timeout}")


@dataclass(frozen=True, kw_only=True, repr=False)
class CheckpointConfig(ShowsWhatWasSet):
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

    num_to_keep: int | None = None
    checkpoint_score_attribute: str | None = None
    checkpoint_score_order: ScoreOrder = "max"
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


@dataclass(frozen=True, kw_only=True, repr=False)
class LoggingConfig(ShowsWhatWasSet):
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
    def level(self) -> int:
        """The level as the number that `logging` uses."""
        return logging.getLevelNamesMapping()[self.log_level.upper()]


@dataclass(frozen=True, kw_only=True, repr=False)
class RunConfig(ShowsWhatWasSet):
    """Where a run lies and how it is kept going.

    Args:
        name: Name of the run's directory. Default: the date, time and six random hex digits.
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
        resume: What to do if the run's directory already holds a run. "auto": go on from its newest
            checkpoint. "never": fail. "must": fail if there is nothing to go on from.
        detached: The run outlives the driver: it is hosted in an actor, and `drawbar.train.attach`
            finds it by its name from any process on the cluster. Callbacks then run in that actor.
        secrets: Names of keys in `train_loop_config`, at any depth, whose values are not written to
            the journal nor shown, besides those that look like secrets, as `hf_token` does.
    """

    name: str | None = None
    storage_path: str | os.PathLike[str] | None = None
    storage_filesystem: Any | None = None
    failure_config: FailureConfig = field(default_factory=FailureConfig)
    checkpoint_config: CheckpointConfig = field(default_factory=CheckpointConfig)
    callbacks: Sequence[UserCallback] = ()
    worker_runtime_env: Mapping[str, Any] | None = None
    logging_config: LoggingConfig = field(default_factory=LoggingConfig)
    forward_env: Sequence[str] = ()
    resume: Resume = "auto"
    detached: bool = False
    secrets: Sequence[str] = ()

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
        require_choice("RunConfig.resume", self.resume, get_args(Resume))
        require_type("RunConfig.detached", self.detached, bool)
        if not is_list_of(str, self.secrets):
            raise TypeError(
                "RunConfig.secrets must be a list of keys of train_loop_config such as "
                f"['license'], found {self.secrets!r}"
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
                f"found {callbacks!r}"
            )
        object.__setattr__(self, "callbacks", tuple(callbacks))


@dataclass(frozen=True, kw_only=True, repr=False)
class DataConfig(ShowsWhatWasSet):
    """Which datasets are split between the workers, and how Ray Data runs them.

    Args:
        datasets_to_split: "all", or the names of the datasets that are split evenly and streamed.
            Every other one is whole on each worker. Default: only "train" is split.
        execution_options: `ray.data.ExecutionOptions` for all datasets, or one per name. Without
            them the order of the rows is preserved, so that a restart goes on inside an epoch; with
            them it is if they say `preserve_order=True`.
        enable_shard_locality: Prefer giving a worker the blocks that lie on its own node. Ray Data
            does so only where the order is not preserved.
        equal: True streams a split dataset, as many rows to each worker, and leaves up to
            `num_workers` - 1 rows out. False gives every row to a worker: consecutive parts, the
            same in every attempt, that differ by one row at most. The dataset is computed once per
            run and stays in Ray's object store. A part can be read without the other workers; a
            restart begins it anew.
        group_column: Rows with the same value in this column go to one worker, side by side; a
            dataset whose groups lie apart is sorted first. Needs `equal=False`.
    """

    datasets_to_split: Literal["all"] | Sequence[str] = ("train",)
    execution_options: Any | None = None
    enable_shard_locality: bool = True
    equal: bool = True
    group_column: str | None = None

    def __post_init__(self) -> None:
        require_type("DataConfig.enable_shard_locality", self.enable_shard_locality, bool)
        require_type("DataConfig.equal", self.equal, bool)
        if self.group_column is not None:
            require_type("DataConfig.group_column", self.group_column, str)
            if self.equal:
                raise ValueError(
                    f"DataConfig.group_column={self.group_column!r} keeps groups whole, so the "
                    "workers cannot get equally many rows; set equal=False"
                )
        names = self.datasets_to_split
        if names == "all":
            return
        if not is_list_of(str, names):
            raise TypeError(
                'DataConfig.datasets_to_split must be "all" or a list of dataset names, '
                f"found {names!r}"
            )
        object.__setattr__(self, "datasets_to_split", tuple(names))

    def splits(self, name: str) -> bool:
        """Whether the dataset of this name is split between the workers."""
        return self.datasets_to_split == "all" or name in self.datasets_to_split

    def splits_exactly(self, name: str) -> bool:
        """Whether it is split so that no row is left out."""
        return self.splits(name) and not self.equal
