"""What an integration may do inside the training function besides what its user may."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._worker.context import (
    all_gather,
    broadcast_from_rank_zero,
    current_session,
    get_context,
    report,
)

_TRAINING_COUNT_SOURCE = "trainings begun"

T = TypeVar("T")


def attempt_local(factory: Callable[[], T]) -> T:
    """Return this rank's object of a kind, which lives as long as the attempt.

    For integrations that keep state between calls in a training function. A module's variables
    would be shared by the ranks that run in threads of one process, and outlive the attempt.

    Args:
        factory: A class or function that makes the object at the first call. Later calls with the
            same factory return the same object.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> registry = attempt_local(LoaderRegistry)
    """
    return current_session("attempt_local").get_local(factory)


def register_data_position(
    name: str, get_position: Callable[[], object], *, add_index: bool = False
) -> Any:
    """Put how far a source of data has been consumed into every checkpoint of this worker.

    For data loaders and shards, inside the training function. The checkpoint gets the position of
    the lowest rank that gives files, so it should be told independently of the world size: samples
    consumed by all ranks together, not by this one.

    Args:
        name: Name of the source, the same on every rank and in every attempt. A second source of
            the same name replaces the first.
        position: Gives the position as a small JSON-able value, or None for a source that is gone;
            called at each report with a checkpoint.
        numbered: Add the source's number among those of this name, in the order of the calls.

    Returns:
        The position in the checkpoint that this attempt goes on from. None if it has none, or has
        been given out in this attempt already.
    """
    session = current_session("register_data_position")
    return session.data_sources.track_position(name, get_position, add_index=add_index)


def get_resume_checkpoint() -> Checkpoint | None:
    """Give the checkpoint that this attempt goes on from; None once it has made one of its own.

    For integrations that go on by themselves, without a line of the user's: a function may train
    several times, and what the first training has saved is not what the second one goes on from.
    """
    return current_session("get_resume_checkpoint").get_resume_checkpoint()


def get_agreed_checkpoint() -> Checkpoint | None:
    """Give the newest checkpoint that rank 0 knows, on every rank. All ranks must call it.

    For what ranks load together: after a `report()` a rank that has given no files to it may not
    have heard yet of the checkpoint that it has made, and `get_checkpoint()` gives the one before.
    """
    session = current_session("get_agreed_checkpoint")
    return session.ensure_local(broadcast_from_rank_zero(session.checkpoint))


def start_training() -> Checkpoint | None:
    """Count a training of this function, and give the checkpoint that it goes on from.

    As `get_resume_checkpoint()`, and if the checkpoint was made by another of the function's
    trainings, say by the second one before a restart, then none is given: this one begins anew. The
    number of the training is kept in every checkpoint that is made until the next one begins.

    Returns:
        The checkpoint; None if this training begins anew. The first training gets also one of
        another run, or of the user's own.
    """
    number = next(current_session("start_training").training_count)
    register_data_position(_TRAINING_COUNT_SOURCE, lambda: number)
    checkpoint = get_resume_checkpoint()
    manifest = None if checkpoint is None else checkpoint.manifest
    if manifest is None or manifest.run_id != get_context().get_run_id():
        return checkpoint if number == 1 else None
    return checkpoint if manifest.data_positions.get(_TRAINING_COUNT_SOURCE, 1) == number else None


def retire_process() -> None:
    """Have this worker's process not run another attempt, which gets a new one instead.

    For frameworks that keep state in the process and have no way to drop it. Inside the training
    function, or around it in `train_func_context`.
    """
    current_session("retire_process").retire_process()


def report_buffered(metrics: Mapping[str, object]) -> None:
    """Report metrics that come often, such as those of every round, without a checkpoint.

    As `drawbar.train.report(metrics)`, but if this worker has said anything within the last quarter
    of a second, the report may reach the driver that much later, along with those that follow. It
    keeps its place among all reports. So a training that fills all cores is held up four times a
    second, however often it reports.

    Raises:
        RuntimeError: Called outside a training function.
        TypeError, ValueError: A metric cannot be kept; the message names its key.
    """
    current_session("report_buffered").report_metrics(metrics, is_buffered=True)


def sync_report_index() -> None:
    """Have every rank made equally many reports, so that each rank's next one belongs together.

    A collective. A rank that has reported less often than another makes up for it by reports
    without metrics. For integrations that report a checkpoint from all ranks in a function whose
    ranks may have reported differently before, such as by a logger that only rank 0 has.
    """
    session = current_session("sync_report_index")
    made = all_gather(session.report_count)
    for _ in range(max(made) - session.report_count):
        report({})


def count_collectives() -> int:
    """Give how often this rank has met the others in this attempt, by Drawbar's own collectives.

    For integrations that look at what a function has done together with other ranks.
    """
    return current_session("collectives_called").collectives.call_count


def add_final_notice(text: str) -> None:
    """Have the run say something when it has finished; nothing is said of one that fails.

    For advice that an error would make pointless, such as that the ranks had nothing to do with
    each other: one of them may just have failed before they could. A text that is given several
    times, or by several ranks, is said once. Inside the training function, or around it in
    `train_func_context`.
    """
    remarks = current_session("remark").final_notices
    if text not in remarks:
        remarks.append(text)


def discard_checkpoint(name: str) -> None:
    """Delete a committed checkpoint of this run before retention would.

    For frameworks that decide themselves which checkpoints to keep. Returns at once. The newest
    checkpoint stays, since a restart begins there, and one that is being validated; a name that is
    not there is no error.

    Args:
        name: The checkpoint's directory in the run. One rank's call is enough.
    """
    current_session("discard_checkpoint").discard_checkpoint(name)
