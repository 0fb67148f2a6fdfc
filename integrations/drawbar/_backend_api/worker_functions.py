"""Functions for framework integrations, for use in the training function."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from drawbar._recovery.rank_recovery import RankRecovery
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.manifest import BEST_CHECKPOINT_SOURCE
from drawbar.train._protocol.messages import CheckpointDiscarded, ProcessRetired
from drawbar.train._worker.active_session import current_session
from drawbar.train._worker.context import (
    all_gather,
    broadcast_from_rank_zero,
    get_context,
    report,
)

_TRAINING_COUNT_SOURCE = "trainings begun"

T = TypeVar("T")


def attempt_local(factory: Callable[[], T]) -> T:
    """Return an object of this rank that lives as long as the attempt.

    Use it for state that an integration keeps between calls in a training function. Module
    variables would be shared by ranks in threads of one process, and would outlive the attempt.

    Args:
        factory: Class or function that creates the object on the first call. Later calls with the
            same factory return the same object.

    Returns:
        The object.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> registry = attempt_local(LoaderRegistry)
    """
    return current_session("attempt_local").get_local(factory)


def register_data_position(
    name: str,
    get_position: Callable[[], object],
    *,
    add_index: bool = False,
    skip_batches: Callable[[int], object] | None = None,
) -> Any:
    """Save the position of a data source in every checkpoint of this worker.

    The checkpoint stores the position of the lowest rank that reports files. The position must
    therefore not depend on the rank or the world size: count the samples of all ranks together.

    Args:
        name: Name of the source, the same on every rank and in every attempt. A second source of
            the same name replaces the first.
        get_position: Returns the position as a small JSON-serializable value, or None if the source
            no longer exists. It is called at each report with a checkpoint.
        add_index: Whether to append the number of the source among sources with this name, in
            call order.
        skip_batches: Returns the position after so many batches more, for `train.rollback()`, which
            raises an error if a source does not support this.

    Returns:
        The position in the resume checkpoint. None if it has no position of this source, or
        if the position was already returned in this attempt.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> position = register_data_position("my_loader", lambda: {"samples": loader.num_consumed})
        >>> if position is not None:
        ...     loader.skip(position["samples"])
    """
    session = current_session("register_data_position")
    return session.data_sources.track_position(
        name, get_position, add_index=add_index, skip_batches=skip_batches
    )


def register_read_ahead(
    get_previous: Callable[[], Mapping[str, object]],
) -> Callable[[], dict[str, object]]:
    """Save earlier positions of data sources from which a framework has read a batch ahead.

    A batch that is read, but not trained yet, must be read again after a restart.

    Args:
        get_previous: Returns the positions to save, by the names of the sources; None for a source
            that had no position. It is called at each report with a checkpoint.

    Returns:
        Function that returns the current positions of all sources by name.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> get_positions = register_read_ahead(lambda: previous if has_batch() else {})
        >>> previous = get_positions()  # before the framework reads a batch
    """
    session = current_session("register_read_ahead")
    return session.data_sources.track_read_ahead(get_previous)


def get_resume_checkpoint() -> Checkpoint | None:
    """Return the checkpoint from which this attempt resumes.

    For integrations that resume automatically: a training function may train several times, and the
    second training must not resume from a checkpoint of the first one.

    Returns:
        The checkpoint. None if there is none, or if a checkpoint was committed in this attempt.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> checkpoint = get_resume_checkpoint()
        >>> if checkpoint is not None:
        ...     restore_from(checkpoint)
    """
    session = current_session("get_resume_checkpoint")
    has_committed = session.checkpoint is not session.assignment.resume_checkpoint
    return None if has_committed else session.get_latest_checkpoint()


def get_agreed_checkpoint() -> Checkpoint | None:
    """Return the latest checkpoint that rank 0 knows, on every rank.

    Collective: call it on all ranks. Use it if all ranks load a checkpoint together: after a
    `report()`, a rank that did not report files may not know the new checkpoint yet, and its
    `get_checkpoint()` returns the previous one.

    Returns:
        The checkpoint, or None if there is none.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> checkpoint = get_agreed_checkpoint()
    """
    session = current_session("get_agreed_checkpoint")
    return session.ensure_local(broadcast_from_rank_zero(session.checkpoint))


def start_training() -> Checkpoint | None:
    """Count a training of this function and return the checkpoint from which it resumes.

    Checkpoints store the number of the training that saved them. A training does not resume from a
    checkpoint of another training of the same function.

    Returns:
        The checkpoint, or None if this training starts from scratch. The first training may also
        resume from a checkpoint of another run, or from one that the user passed.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> checkpoint = start_training()
        >>> model.fit(data, resume_from=checkpoint)
    """
    number = next(current_session("start_training").training_count)
    register_data_position(_TRAINING_COUNT_SOURCE, lambda: number)
    checkpoint = get_resume_checkpoint()
    manifest = None if checkpoint is None else checkpoint.manifest
    if manifest is None or manifest.run_id != get_context().get_run_id():
        return checkpoint if number == 1 else None
    return checkpoint if manifest.data_positions.get(_TRAINING_COUNT_SOURCE, 1) == number else None


def get_recovery() -> RankRecovery | None:
    """Return the in-place recovery of this rank.

    Returns:
        The recovery; None without `FailureConfig(recovery="in_place")`.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> recovery = get_recovery()
        >>> if recovery is not None:
        ...     recovery.set_member(leave_collectives, recover)
    """
    return current_session("get_recovery").recovery


def retire_process() -> None:
    """Use a new process for the next attempt of this worker.

    For frameworks that keep state in the process and cannot reset it. Call it in the training
    function, or around it in `train_func_context`.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> retire_process()
    """
    current_session("retire_process").send(ProcessRetired())


def report_buffered(metrics: Mapping[str, object]) -> None:
    """Report metrics at a high rate, for example once per boosting round, without a checkpoint.

    Like `drawbar.train.report(metrics)`, except that the report may reach the driver up to 0.25 s
    later, together with other messages of this worker. The order of reports does not change. This
    limits the interruptions of a training that uses all cores to four per second.

    Args:
        metrics: Metrics by name. See `drawbar.train.report()`.

    Raises:
        RuntimeError: Called outside a training function.
        TypeError: A metric has an unsupported type.
        ValueError: A metric has an unsupported value.

    Example:
        >>> report_buffered({"valid-rmse": 0.31})
    """
    current_session("report_buffered").report_metrics(metrics, is_buffered=True)


def sync_report_index() -> None:
    """Make the next reports of all ranks belong to the same round.

    Collective: call it on all ranks. A rank with fewer reports than others adds reports without
    metrics. Use it before all ranks report a checkpoint, if the user's code may have reported on
    some ranks only, for example through a logger on rank 0.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> sync_report_index()
        >>> train.report(metrics, checkpoint=path)
    """
    session = current_session("sync_report_index")
    report_counts = all_gather(session.report_count)
    for _ in range(max(report_counts) - session.report_count):
        report({})


def count_collectives() -> int:
    """Return the number of Drawbar collectives that this rank has called in this attempt.

    Returns:
        The number of calls, including calls by integrations.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> num_collectives = count_collectives()
    """
    return current_session("count_collectives").collectives.call_count


def add_final_notice(text: str) -> None:
    """Print a notice when the run has finished successfully.

    For advice that is misleading after an error, for example that the ranks never communicated: a
    rank may have failed before it could. A text is printed only once, also if several ranks add it.
    Call it in the training function, or around it in `train_func_context`.

    Args:
        text: Text of the notice.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> add_final_notice("Set num_workers=4 in the DataLoader to load data in parallel.")
    """
    notices = current_session("add_final_notice").final_notices
    if text not in notices:
        notices.append(text)


def discard_checkpoint(name: str) -> None:
    """Delete a committed checkpoint of this run before the retention policy would.

    For frameworks that decide which checkpoints to keep. Returns immediately. The latest checkpoint
    and checkpoints that are being validated are kept. Unknown names are ignored.

    Args:
        name: Name of the checkpoint directory in the run directory. A call on one rank is enough.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> discard_checkpoint("checkpoint_000003")
    """
    current_session("discard_checkpoint").send(CheckpointDiscarded(checkpoint_name=name))


def register_best_checkpoint(get_best: Callable[[], str | Mapping[str, object] | None]) -> None:
    """Record in every checkpoint of this worker which checkpoint the framework calls its best.

    For frameworks that rank checkpoints themselves. `drawbar clean --keep` never deletes the best
    checkpoint that the newest one names. Call it once for each training or each ranking.

    Args:
        get_best: Returns the name of the checkpoint directory, or metrics that identify the
            checkpoint, or None if there is no best checkpoint yet. It is called at each report with
            a checkpoint, and may already return the checkpoint that is being reported.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> register_best_checkpoint(lambda: {"step": trainer.best_step})
    """
    register_data_position(BEST_CHECKPOINT_SOURCE, get_best, add_index=True)


def get_worker_environment() -> dict[str, str]:
    """Return the environment variables for a process that represents this rank.

    Ranks may be threads of one process. Then `os.environ` does not contain the variables of the
    rank, such as RANK.

    Returns:
        The variables of this process and of the rank.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> run_program(["train.py"], get_worker_environment())
    """
    assignment = current_session("get_worker_environment").assignment
    return {**os.environ, **assignment.make_worker_env()}
