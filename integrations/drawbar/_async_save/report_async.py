"""Report a checkpoint that another process writes while training continues."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import wait
from functools import partial
from typing import cast

from drawbar._async_save.background_writer import BackgroundWriter, Replicate
from drawbar._async_save.memory_copies import close_unmapped_files, make_run_key
from drawbar._async_save.memory_files import MemoryFiles
from drawbar._async_save.memory_store import OBSERVATION_KIND
from drawbar._async_save.replicator import Replicator
from drawbar._base.metrics import normalize
from drawbar.train._config.checkpoint_modes import CheckpointUploadMode
from drawbar.train._config.validation_config import ValidationTaskConfig
from drawbar.train._protocol.messages import Observation
from drawbar.train._worker.active_session import current_session
from drawbar.train._worker.report_checks import BackgroundWrite, UploadOptions
from drawbar.train._worker.session import Session


def report_async(
    metrics: Mapping[str, object],
    save: Callable[[MemoryFiles], None],
    validation: bool | ValidationTaskConfig = False,
) -> float:
    """Report metrics and a checkpoint that another process writes from memory to storage.

    For frameworks that can save to a file object. Training continues when `save` has returned.
    The next call waits until the files of this one are written. If they cannot be written, the next
    report raises an error; after the last report, the end of the training function does.

    Args:
        metrics: See `drawbar.train.report()`.
        save: Function that saves the checkpoint to files in shared memory. Ranks may save a file of
            the same path only with the same content, because a restart from memory reads any of
            them.
        validation: See `drawbar.train.report()`.

    Returns:
        Seconds that the call took: the wait for the files of the previous call, and `save`.

    Raises:
        RuntimeError: Called outside a training function.
        CheckpointError: The process that wrote the previous checkpoint has died.
        StorageError: The previous checkpoint could not be written, for example to a full disk.
        OSError: There is not enough memory.

    Example:
        >>> def save(files):
        ...     with files.open("state.pt") as file:
        ...         torch.save(state, file)
        >>> report_async({"loss": 0.5}, save)
    """
    start = time.monotonic()
    session = current_session("report_async")
    normalize(metrics)  # raises errors before the time-consuming part
    writes = session.get_local(deque[BackgroundWrite])
    with session.timer.measure("checkpoint_blocked"):
        while writes:
            writes.popleft().done.result()
    close_unmapped_files()  # before the memory of the next checkpoint is selected
    assignment = session.assignment
    writer = cast("BackgroundWriter | None", session.cache.get(BackgroundWriter))
    if writer is None:
        run_key = make_run_key(assignment.run_id, assignment.run_directory)
        writer = BackgroundWriter(run_key, assignment.ranks.world_rank)
        session.cache[BackgroundWriter] = writer  # all attempts of this process use it
    with session.checkpoint_dir() as directory:
        save(writer.clear_files())
        write = writer.submit(directory, assignment.attempt, _make_replicate(session))
        options = UploadOptions(None, CheckpointUploadMode.ASYNC, None, None, write)
        try:
            session.report_checkpoint(metrics, directory, options, validation)
        except BaseException:
            write.report_index.cancel()
            wait([write.done])  # the directory is deleted
            raise
        write.report_index.cancel()  # has no effect if the checkpoint was reported
        writes.append(write)
    return time.monotonic() - start


def _make_replicate(session: Session) -> Replicate | None:
    """Return the function that copies checkpoints of this attempt; None without stores."""
    stores, rank = session.assignment.memory_stores, session.assignment.ranks.world_rank
    if stores is None:
        return None

    def notify(reason: str) -> None:
        payload = {"rank": rank, "reason": reason}
        session.send(Observation(kind=OBSERVATION_KIND, payload=payload, is_activity=False))

    return partial(session.get_local(Replicator).submit, stores, notify)
