"""What a training function calls: `report`, `get_context`, `get_checkpoint` and their companions.

Each function finds the session of the attempt it runs in. A worker process has one, for all its
threads; the threads of `drawbar.train.testing` have one each. In a forked child only
`get_context()` works, for those who ask their rank there, such as a DataLoader's `worker_init_fn`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from drawbar.train._config.checks import parse_duration
from drawbar.train._config.data_config import TRAIN_DATASET_KEY
from drawbar.train._config.validation_config import ValidationTaskConfig
from drawbar.train._driver_env import TuneTrial
from drawbar.train._messages import CheckpointConsistencyMode, PreemptionInfo
from drawbar.train._metrics import Metrics
from drawbar.train._package_files import is_drawbar_frame
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.manifest import ReportedCheckpointStatus
from drawbar.train._storage.storage_context import StorageContext
from drawbar.train._worker.program_session import program_session
from drawbar.train._worker.session import Session
from drawbar.train._worker.uploads import CheckpointUploadFn, CheckpointUploadMode

if TYPE_CHECKING:
    from ray.data import DataIterator


class _ThreadLocalSession(threading.local):
    session: Session | None = None


_process_sessions: list[Session] = []
_thread_local = _ThreadLocalSession()


@contextmanager
def use_session(session: Session, *, is_process_wide: bool) -> Iterator[None]:
    """Make a session that of the calling thread; of threads that have none too, if it is whole.

    Runs with `num_workers=0` in several threads begin and end in any order.
    """
    session.thread_guard.start()
    # Given back at the end: with `num_workers=0` a function may call `fit()` itself.
    previous, _thread_local.session = _thread_local.session, session
    if is_process_wide:
        _process_sessions.append(session)
    try:
        yield
    finally:
        _thread_local.session = previous
        if is_process_wide:
            _process_sessions.remove(session)


def current_session(function_name: str) -> Session:
    """Give the session of this thread or process, to speak for its rank.

    Raises:
        RuntimeError: The caller is not inside a training function, or is in a process that was
            forked from there, or in a thread of an earlier attempt.
    """
    session = _find_session(function_name)
    session.thread_guard.check_caller(function_name)
    return session


def _find_session(caller: str | None = None) -> Session:
    # The thread's own first: in the worlds of `testing` several ranks share this process.
    session = _thread_local.session or next(reversed(_process_sessions), None) or program_session()
    if session is None:
        raise RuntimeError(
            f"{caller or _find_public_caller()}() works inside a training function that a Drawbar "
            "trainer runs, while it runs. This is the driver, another process, a thread that goes "
            "on after the function, or, with drawbar.train.testing, any other thread. Call it from "
            "train_loop_per_worker"
        )
    return session


def _find_public_caller() -> str:
    """Name the function of Drawbar, or of an integration, that somebody else has called."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_drawbar_frame(frame.f_back):
        frame = frame.f_back
    return frame.f_code.co_qualname.removesuffix(".__init__")


class TrainContext:
    """Who this worker is and which run it belongs to. Get it by `get_context()`."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._assignment = session.assignment

    def get_experiment_name(self) -> str:
        """Name of the run: `RunConfig.name`."""
        return self._assignment.directory.name

    def get_run_id(self) -> str:
        """Identity of the run, 32 hex digits; the same over restarts and resumes."""
        return self._assignment.run_id

    def get_attempt(self) -> int:
        """Number of this attempt: 0 at first, one more for every restart and resume."""
        return self._assignment.attempt

    def get_trial_name(self) -> str | None:
        """Name of the trial of Ray Tune that the run belongs to; None if it belongs to none."""
        return self._trial.name if self._trial else None

    def get_trial_id(self) -> str | None:
        """Id of the trial of Ray Tune; None if there is none."""
        return self._trial.id if self._trial else None

    def get_trial_dir(self) -> str | None:
        """Where the trial of Ray Tune lies; None if there is none."""
        return self._trial.directory if self._trial else None

    def get_trial_resources(self) -> Any:
        """`ray.tune.PlacementGroupFactory` of the trial of Ray Tune; None if there is none."""
        return self._trial.placement_group_factory.deserialize() if self._trial else None

    @property
    def _trial(self) -> TuneTrial | None:
        surroundings = self._assignment.spec.surroundings
        return surroundings.tune_trial if surroundings else None

    def get_world_size(self) -> int:
        """Number of workers."""
        return self._assignment.ranks.world_size

    def get_world_rank(self) -> int:
        """This worker's number among all, from 0."""
        return self._assignment.ranks.world_rank

    def get_local_rank(self) -> int:
        """This worker's number among those on its node, from 0."""
        return self._assignment.ranks.local_rank

    def get_local_world_size(self) -> int:
        """Number of workers on this node."""
        return self._assignment.ranks.local_world_size

    def get_node_rank(self) -> int:
        """Number of this node among those with workers, from 0."""
        return self._assignment.ranks.node_rank

    def get_accelerator_ids(self) -> tuple[str, ...]:
        """Ids of the GPUs that Ray gave to this worker, as Ray names them.

        With `num_workers=0`: of the first ones that this process sees, as many as were asked for.
        """
        return self._assignment.gpu_ids

    def get_storage(self) -> StorageContext:
        """The run's directory: a path, and where that is on the storage's filesystem."""
        return StorageContext(self._session.directory)

    def get_metadata(self) -> dict[str, Any]:
        """The trainer's `metadata`."""
        return dict(self._assignment.spec.metadata)

    def diagnose(self) -> str:
        """Write every rank's stacks to `<run>/stacks`, and say in words which ranks stand where."""
        return current_session("get_context().diagnose").diagnose()

    @property
    def cache(self) -> dict[Any, Any]:
        """A dict that lives as long as this process: a restart finds again what is put there.

        Use it for what is expensive to load and does not change: a dataset, a tokenizer, a compiled
        model.
        """
        return self._session.cache

    def __repr__(self) -> str:
        ranks = self._assignment.ranks
        return (
            f"TrainContext({self.get_experiment_name()!r}, rank {ranks.world_rank} of "
            f"{ranks.world_size}, attempt {self.get_attempt()})"
        )


def get_context() -> TrainContext:
    """Give this worker's context: ranks, names, cache. Works in forked children too.

    Raises:
        RuntimeError: Called outside a training function.
    """
    return TrainContext(_find_session())


def report(
    metrics: Mapping[str, object],
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: CheckpointUploadFn | None = None,
    validation: bool | ValidationTaskConfig = False,
) -> None:
    """Report metrics, and with them perhaps a checkpoint.

    Without a checkpoint this never blocks and needs no other rank. Every rank's metrics are kept.

    With a checkpoint, the k-th report of each rank belongs together. Ranks that give files are
    merged into one checkpoint; a file that several ranks give is stored once, from the lowest rank;
    a rank whose k-th report has no checkpoint gives no files and does not wait. So `if rank == 0`
    may decide who saves, while all ranks report. The checkpoint carries the metrics of the lowest
    rank that gave files.

    Any thread of the function may report. With several workers it must be one and the same, that
    calls the collectives too, since between threads it is chance which report is the k-th.

    Args:
        metrics: Numbers, strings, booleans, None, lists and dicts of them, arrays and tensors of
            one element. NaN and infinity are kept as they are.
        checkpoint: A directory, as a `Checkpoint` or a path. One made by `checkpoint_dir()` is
            committed by a rename; any other is copied.
        checkpoint_dir_name: Name of the checkpoint's directory in the run. Default: `checkpoint_`
            and the report's number in six digits.
        checkpoint_upload_mode: SYNC returns when the checkpoint is committed; ASYNC as soon as the
            files may be overwritten; NO_UPLOAD commits a directory that lies directly in the run's
            directory already, where it is.
        delete_local_checkpoint_after_upload: Hand the local directory over: it is moved, not
            copied. Default: False for SYNC, True for ASYNC.
        checkpoint_upload_fn: Called as `function(checkpoint, name)` instead of Drawbar's own
            upload, on every rank that reports a checkpoint, and with all of that rank's files, also
            those that other ranks have too; puts them into the run's storage under that name and
            returns the `Checkpoint` there.
        validation: Have the checkpoint validated by the trainer's `validation_config` once it is
            committed; a `ValidationTaskConfig` adds to what that says. This does not wait for it.
            Of several ranks that give files the lowest that asks for it counts.

    Raises:
        RuntimeError: Called outside a training function, or in a process that was forked there, or
            by a second thread where only one may.
        TypeError, ValueError: A metric cannot be kept; the message names its key. Or the checkpoint
            does not lie where its mode wants it, or its upload function takes
            other arguments, or there is none to validate, or no `validation_config`.
        StorageError: The storage, full or read-only, refuses the files; the message has the path
            and the bytes. If it is let through, the run ends without another attempt.
        OSError: The storage did not take the files after six tries; as for any other exception, the
            run may be restarted.
        FileNotFoundError: `checkpoint` is not a directory here.
    """
    current_session("report").report(
        metrics,
        checkpoint,
        name=checkpoint_dir_name,
        mode=checkpoint_upload_mode,
        delete_local=delete_local_checkpoint_after_upload,
        upload_fn=checkpoint_upload_fn,
        validation=validation,
    )


def get_checkpoint() -> Checkpoint | None:
    """Give the newest committed checkpoint of the run, None if there is none yet.

    At the start of an attempt that is the one to go on from; after a report with a checkpoint, that
    one.
    """
    return current_session("get_checkpoint").get_latest_checkpoint()


def get_preemption_info() -> PreemptionInfo | None:
    """Tell whether nodes of this run are about to be taken away, and until when they stay.

    A collective: every rank must call it equally often, and all get the same answer. When there is
    one, save a checkpoint: once it is committed, the run moves to other nodes by itself.
    """
    return current_session("get_preemption_info").collectives.get_requests().preemption


def should_checkpoint() -> bool:
    """Tell whether the run wants a checkpoint now: nodes are to be taken away, or it is to stop.

    A collective, like `get_preemption_info`. Call it once in a while, at a step where all ranks
    could save.
    """
    return current_session("should_checkpoint").collectives.get_requests().checkpoint


def checkpoint_dir() -> AbstractContextManager[Path]:
    """Give a new directory that already lies where the checkpoint will.

    Save into it and report it: on a local filesystem the commit is a rename and no byte is copied.
    Report inside the `with` block or after it. If the block raises, the directory is removed.

        with train.checkpoint_dir() as path:
            torch.save(model.state_dict(), path / "model.pt")
            train.report({"loss": loss}, checkpoint=path)
    """
    return current_session("checkpoint_dir").checkpoint_dir()


class ReportedCheckpoint(NamedTuple):
    """A committed checkpoint, its metrics with those of its validation, and how far that is."""

    checkpoint: Checkpoint
    metrics: Metrics
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
    timeout_s: float | timedelta | None = None,
) -> list[ReportedCheckpoint]:
    """List the committed checkpoints that are still kept, oldest first.

    Ranks that have reported equally often get the same list: it waits until every rank has reported
    as often as this one, or has finished.

    Args:
        consistency_mode: COMMITTED waits for the commits of those reports, VALIDATED for the
            validations too.
        timeout_s: How long to wait, in seconds or as a timedelta; then the list is given as it is,
            with validations that are still pending. None waits without limit.

    Raises:
        RuntimeError: Called outside a training function.
        TypeError, ValueError: `consistency_mode` is not a `CheckpointConsistencyMode`, or
            `timeout_s` no duration.
    """
    if not isinstance(consistency_mode, CheckpointConsistencyMode):
        raise TypeError(
            "consistency_mode must be a CheckpointConsistencyMode, "
            f"found {consistency_mode!r}; write CheckpointConsistencyMode.COMMITTED"
        )
    if timeout_s is not None:
        timeout_s = parse_duration(
            "timeout_s", timeout_s, none_meaning="waits without limit", can_be_zero=True
        )
    session = current_session("get_all_reported_checkpoints")
    return [
        ReportedCheckpoint(*each)
        for each in session.get_all_checkpoints(consistency_mode, timeout_s)
    ]


def get_dataset_shard(dataset_name: str = TRAIN_DATASET_KEY) -> DataIterator:
    """Give this worker's shard of one of the trainer's datasets, or the whole if it is not split.

    After a restart the first pass over it is what the checkpoint has left of the epoch, which is
    nothing if that was made with the last batch, before the pass was over.

    Args:
        dataset_name: Its name in the trainer's `datasets`.

    Raises:
        KeyError: The trainer was given no dataset of this name; the message lists the names.
    """
    shard: object = current_session("get_dataset_shard").data_sources.get_shard(dataset_name)
    return cast("DataIterator", shard)  # it has the methods of one


T = TypeVar("T")


def barrier(timeout_s: float | None = None) -> None:
    """Wait until every rank has called this.

    Args:
        timeout_s: How long to wait, in seconds. Default: as long as it takes.

    Raises:
        TimeoutError: Not every rank has come in that time. The ranks cannot meet any more after it.
    """
    current_session("collective.barrier").collectives.call("barrier", timeout=timeout_s)


def broadcast_from_rank_zero(data: T) -> T:
    """Give rank 0's `data` to every rank; what the other ranks pass is ignored.

    Meant for addresses, seeds and settings; anything that pickles is taken.
    """
    session = current_session("collective.broadcast_from_rank_zero")
    (value,) = session.collectives.call("broadcast_from_rank_zero", data)
    if session.assignment.ranks.world_rank == 0:
        return data
    result: T = value
    return result


def all_gather(data: T) -> list[T]:
    """Give every rank's `data` to every rank, in rank order. Anything that pickles is taken."""
    return current_session("collective.all_gather").collectives.call("all_gather", data)
