"""Functions for use in the training function: report, get_checkpoint, get_context, addresses.

Each function uses the session of the attempt it runs in (see `active_session`). In a forked child,
only `get_context()` works, because code such as a DataLoader's `worker_init_fn` needs the rank.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

from drawbar._base.fields import parse_duration
from drawbar._base.metrics import Metrics
from drawbar._process.errors import PreemptionInfo
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.manifest import ReportedCheckpointStatus
from drawbar.train._config.checkpoint_modes import CheckpointConsistencyMode, CheckpointUploadMode
from drawbar.train._config.data_source import TRAIN_DATASET_KEY
from drawbar.train._config.validation_config import ValidationTaskConfig
from drawbar.train._worker.active_session import current_session, find_session
from drawbar.train._worker.report_checks import CheckpointUploadFn, UploadOptions
from drawbar.train._worker.train_context import TrainContext

LOOPBACK = "127.0.0.1"


def get_context() -> TrainContext:
    """Return the context of this worker: ranks, names, and cache.

    Child processes that are forked from the worker can call this function, too.

    Returns:
        The context of the attempt that calls this function.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> rank = train.get_context().get_world_rank()
    """
    return TrainContext(find_session())


def report(
    metrics: Mapping[str, object],
    checkpoint: Checkpoint | str | os.PathLike[str] | None = None,
    checkpoint_dir_name: str | None = None,
    checkpoint_upload_mode: CheckpointUploadMode = CheckpointUploadMode.SYNC,
    delete_local_checkpoint_after_upload: bool | None = None,
    checkpoint_upload_fn: CheckpointUploadFn | None = None,
    validation: bool | ValidationTaskConfig = False,
) -> None:
    """Report metrics and, optionally, a checkpoint.

    Without a checkpoint, this function never blocks or waits for other ranks. The metrics of every
    rank are kept. If all ranks together report more than 100 times per second, reports without a
    checkpoint are sent in batches, up to 2 s later. A report without a checkpoint may be lost if
    the process is killed before it is sent, even if `report()` has returned.

    The k-th reports of all ranks form one round, and each round produces at most one checkpoint,
    with the files of all ranks that report one. If several ranks report the same file, the file of
    the lowest rank is stored. A rank that reports no checkpoint does not wait. So all ranks can
    report while only rank 0 saves. The checkpoint has the metrics of the lowest rank that reports
    files.

    Any thread of the training function may report. With several workers, reports and collectives
    must come from one thread, because otherwise the order of the reports is undefined.

    Args:
        metrics: Numbers, strings, booleans, None, lists and dicts of these, and arrays and tensors
            with one element. NaN and infinity are allowed.
        checkpoint: Directory, as a `Checkpoint` or a path. A directory of `checkpoint_dir()` is
            committed by a rename; any other directory is copied.
        checkpoint_dir_name: Name of the checkpoint directory in the run directory. Default:
            `checkpoint_` and the report index in six digits.
        checkpoint_upload_mode: SYNC returns after the commit. ASYNC returns as soon as the files
            may be overwritten. NO_UPLOAD commits the directory in place.
        delete_local_checkpoint_after_upload: Whether to move the local directory instead of
            copying it. Default: False for SYNC, True for ASYNC.
        checkpoint_upload_fn: Function that replaces Drawbar's upload. It is called as
            `function(checkpoint, name)` on every rank that reports a checkpoint, with all files of
            that rank. It uploads them to the run's storage under `name` and returns the uploaded
            `Checkpoint`.
        validation: Whether to validate the checkpoint with the trainer's `validation_config` after
            the commit. A `ValidationTaskConfig` overrides arguments of it. `report()` does not wait
            for the validation. If ranks differ, the lowest rank that requests one decides.

    Raises:
        RuntimeError: Called outside a training function or in a forked child process. With several
            workers, also if called from a second thread.
        TypeError: A metric, the upload mode, or the upload function is invalid.
        ValueError: A metric is invalid, the mode does not support the location of the checkpoint,
            or `validation` is set without a checkpoint or `validation_config`.
        StorageError: The storage is full or read-only. If the training function does not catch it,
            the run ends without a restart.
        OSError: The storage failed six times. The run may be restarted.
        FileNotFoundError: `checkpoint` is not a directory on this node.

    Example:
        >>> with train.checkpoint_dir() as path:
        ...     torch.save(model.state_dict(), path / "model.pt")
        ...     train.report({"loss": loss}, checkpoint=path)
    """
    session = current_session("report")
    if checkpoint is None and validation is False:
        session.report_metrics(metrics)
        return
    options = UploadOptions(
        name=checkpoint_dir_name,
        mode=checkpoint_upload_mode,
        delete_local=delete_local_checkpoint_after_upload,
        upload_fn=checkpoint_upload_fn,
    )
    session.report_checkpoint(metrics, checkpoint, options, validation)


def get_checkpoint() -> Checkpoint | None:
    """Return the latest committed checkpoint of the run, or None if there is none.

    Returns:
        At the start of an attempt, the checkpoint to resume from; after a report with a checkpoint,
        that checkpoint.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> checkpoint = train.get_checkpoint()
        >>> if checkpoint is not None:
        ...     with checkpoint.as_directory() as path:
        ...         model.load_state_dict(torch.load(os.path.join(path, "model.pt")))
    """
    return current_session("get_checkpoint").get_latest_checkpoint()


def get_preemption_info() -> PreemptionInfo | None:
    """Return which nodes of this run will be preempted, and when.

    Call it on all ranks equally often, together with `should_checkpoint()`; all ranks receive the
    same value. If it is not None, save a checkpoint: after its commit, the run moves to other
    nodes.

    Returns:
        The announced preemption, or None.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> if train.get_preemption_info() is not None:
        ...     save_and_report_checkpoint()
    """
    return current_session("get_preemption_info").requests.get().preemption


def should_checkpoint() -> bool:
    """Return whether to save a checkpoint now, because of a preemption or a stop request.

    Call it on all ranks equally often, in each step; the k-th call returns the same value on all
    ranks. A call only counts, which takes a few microseconds. Only after a request, one call waits
    until all ranks have replied to the controller.

    Returns:
        True if a checkpoint is requested.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> if train.should_checkpoint() or step % 1000 == 0:
        ...     save_and_report_checkpoint()
    """
    return current_session("should_checkpoint").requests.get().should_checkpoint


def rollback(reason: str, *, skip: int = 0, to: int = 1) -> NoReturn:
    """Restart all ranks from an earlier checkpoint, and leave out a part of the data.

    Call it after a loss that is NaN or has a spike, inside the loop over a data loader of
    `prepare_data_loader`. The batches between the checkpoint and the call are not used again. One
    rank can call it, or several.

    The run never resumes from the checkpoints after the target again. They are moved to the
    directory `broken` of the run, or deleted in an object store. `FailureConfig.max_rollbacks`
    limits the number of rollbacks. If it is used up, the run ends with an error whose
    `should_retry` is False.

    Args:
        reason: Reason, for the journal, the console, and the error.
        skip: Number of batches of each rank to skip after the current batch, at most to the end of
            the epoch.
        to: Number of checkpoints to go back: 1 is the latest one, 2 the one before. If there are
            fewer, the run resumes from the oldest one, or starts again without one.

    Returns:
        Never: Drawbar interrupts the function.

    Raises:
        RuntimeError: Called outside a training function, or a data source cannot skip batches.
        TypeError: `reason` is not a string, or `skip` or `to` is not an integer.
        ValueError: `reason` is empty, `skip` is negative, or `to` is below 1.

    Example:
        >>> for x, y in loader:
        ...     loss = compute_loss(model, x, y)
        ...     if not math.isfinite(loss):
        ...         train.rollback(f"loss is {loss}", skip=200, to=2)
    """
    session = current_session("rollback")
    if not isinstance(reason, str):
        raise TypeError(f"rollback(reason) must be a string, found {reason!r}.")
    if not reason.strip():
        raise ValueError("rollback() needs a reason, which the journal shows, but it is empty.")
    for name, value, minimum in (("skip", skip, 0), ("to", to, 1)):
        if type(value) is not int:
            raise TypeError(f"rollback({name}=...) must be an integer, found {value!r}.")
        if value < minimum:
            raise ValueError(f"rollback({name}={value}) must be at least {minimum}.")
    session.roll_back(reason, skip, to)


def checkpoint_dir() -> AbstractContextManager[Path]:
    """Create a directory for a checkpoint in the staging area of the run.

    Save to it and report it, inside or after the `with` block. On a local filesystem the commit is
    a rename, which copies no data. If the block raises an exception, the directory is deleted.

    Returns:
        A context manager that returns the path of the directory.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> with train.checkpoint_dir() as path:
        ...     torch.save(model.state_dict(), path / "model.pt")
        ...     train.report({"loss": loss}, checkpoint=path)
    """
    return current_session("checkpoint_dir").checkpoint_dir()


class ReportedCheckpoint(NamedTuple):
    """Committed checkpoint with its metrics and validation status.

    Attributes:
        checkpoint: The checkpoint.
        metrics: Reported metrics, and metrics of its validation.
        status: Whether the checkpoint is committed, or its validation pending or done.

    Example:
        >>> for reported in train.get_all_reported_checkpoints():
        ...     print(reported.checkpoint.path, reported.metrics, reported.status)
    """

    checkpoint: Checkpoint
    metrics: Metrics
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.COMMITTED


def get_all_reported_checkpoints(
    consistency_mode: CheckpointConsistencyMode = CheckpointConsistencyMode.VALIDATED,
    timeout_s: float | timedelta | None = None,
) -> list[ReportedCheckpoint]:
    """Return the committed checkpoints that have not been deleted, oldest first.

    Waits until every other rank has reported as often as this one or has finished, so ranks with
    the same number of reports receive the same list.

    Args:
        consistency_mode: COMMITTED waits for the commits of these reports, VALIDATED also for the
            validations.
        timeout_s: Time limit, in seconds or as a timedelta. After it, the current list is returned,
            which may include pending validations. None waits without limit.

    Returns:
        The checkpoints with their metrics and status.

    Raises:
        RuntimeError: Called outside a training function.
        TypeError: `consistency_mode` is not a `CheckpointConsistencyMode`, or `timeout_s` is not a
            duration.
        ValueError: `timeout_s` is negative.

    Example:
        >>> for checkpoint, metrics, status in train.get_all_reported_checkpoints():
        ...     print(checkpoint.path, metrics["loss"], status)
    """
    if not isinstance(consistency_mode, CheckpointConsistencyMode):
        raise TypeError(
            "consistency_mode must be a CheckpointConsistencyMode, "
            f"found {consistency_mode!r}. Use CheckpointConsistencyMode.COMMITTED, for example."
        )
    if timeout_s is not None:
        timeout_s = parse_duration(
            "timeout_s", timeout_s, none_meaning="waits without limit", can_be_zero=True
        )
    session = current_session("get_all_reported_checkpoints")
    return [
        ReportedCheckpoint(*entry)
        for entry in session.get_all_checkpoints(consistency_mode, timeout_s)
    ]


def get_dataset_shard(dataset_name: str = TRAIN_DATASET_KEY) -> Any:
    """Return this worker's shard of a dataset, or the full dataset if it is not split.

    After a restart, the first epoch contains the rows that were unread at the resume checkpoint.
    The epoch is empty if the checkpoint was reported inside the loop, with the last batch.

    Args:
        dataset_name: Key of the dataset in the trainer's `datasets`.

    Returns:
        An iterator with the methods of `ray.data.DataIterator`, or a shard of the `DataSource` that
        was passed as `datasets`.

    Raises:
        RuntimeError: Called outside a training function.
        KeyError: The trainer has no dataset of this name.

    Example:
        >>> for batch in train.get_dataset_shard("train").iter_torch_batches(batch_size=32):
        ...     train_step(batch)
    """
    return current_session("get_dataset_shard").data_sources.get_shard(dataset_name)


T = TypeVar("T")


def barrier(timeout_s: float | None = None) -> None:
    """Wait until every rank has called this function.

    Args:
        timeout_s: Time limit in seconds. None waits without limit.

    Raises:
        RuntimeError: Called outside a training function.
        TimeoutError: Not every rank called it within the limit. The ranks cannot use collectives
            afterwards.

    Example:
        >>> train.collective.barrier(timeout_s=60)
    """
    current_session("collective.barrier").collectives.call("barrier", timeout=timeout_s)


def broadcast_from_rank_zero(data: T) -> T:
    """Return rank 0's `data` on every rank.

    Use it for small objects such as addresses, seeds, and settings.

    Args:
        data: Picklable object. The values of ranks above 0 are ignored.

    Returns:
        The object of rank 0.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> seed = train.collective.broadcast_from_rank_zero(random.getrandbits(32))
    """
    session = current_session("collective.broadcast_from_rank_zero")
    (value,) = session.collectives.call("broadcast_from_rank_zero", data)
    if session.assignment.ranks.world_rank == 0:
        return data
    result: T = value
    return result


def all_gather(data: T) -> list[T]:
    """Return the `data` of all ranks on every rank, in rank order.

    The data passes through the controller, and every rank receives all of it. The run fails if the
    serialized data of all ranks exceeds 1 GB.

    Args:
        data: Picklable object.

    Returns:
        One object per rank.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> losses = train.collective.all_gather(loss)
    """
    return current_session("collective.all_gather").collectives.call("all_gather", data)


def get_node_address() -> str:
    """Return the address of this node in the Ray cluster. Works in any process.

    For frameworks that start a service in the controller, such as a tracker. In the training
    function, use `get_worker_address()`.

    Returns:
        IP address at which other nodes reach this node.

    Example:
        >>> tracker_uri = f"{get_node_address()}:{port}"
    """
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # Ray has no types here


def get_worker_address() -> str:
    """Return the address at which the other workers of the run reach this worker.

    Returns:
        The loopback address if all workers are on one node, because it needs no network and no
        firewall or VPN blocks it. Otherwise, the IP address of this node.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> address = broadcast_from_rank_zero(f"{get_worker_address()}:{port}")
    """
    context = get_context()
    on_one_node = context.get_local_world_size() == context.get_world_size()
    return LOOPBACK if on_one_node else get_node_address()
