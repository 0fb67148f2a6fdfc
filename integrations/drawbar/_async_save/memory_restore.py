"""Resume ranks from copies of checkpoints in memory, and release the copies at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from drawbar._async_save.memory_copies import (
    RunAnchor,
    make_run_key,
    open_memory_copy,
    read_from_memory,
)
from drawbar._async_save.replicator import request_from_stores
from drawbar._records.live_events import Event
from drawbar._storage.local_copies import use_copies
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.messages import Observation


@contextmanager
def resume_from_memory(
    assignment: WorkerAssignment, send: Callable[[Observation], None]
) -> Iterator[None]:
    """Let a rank read the resume checkpoint from memory, and report the source of each read.

    Args:
        assignment: Assignment of the rank.
        send: Callback that sends messages to the controller.
    """
    checkpoint = assignment.resume_checkpoint
    if checkpoint is None:
        yield
        return
    name, run_id = Path(checkpoint.path).name, assignment.run_id
    run_key = make_run_key(run_id, assignment.run_directory)

    def on_read(source: str) -> None:
        send(Observation(kind="checkpoint_read", payload={"name": name, "source": source}))

    stores = assignment.memory_stores
    request_from_peers = None if stores is None else partial(request_from_stores, stores)
    with (
        read_from_memory(checkpoint.path, run_id, run_key, on_read, request_from_peers),
        use_copies(open_memory_copy),
    ):
        yield


class CopyReleaser:
    """Watcher that releases the copies on this node when the run, or this process, ends.

    The copies on other nodes are released by their ranks, or expire.

    Args:
        run_key: Identifier of the run, as in `make_run_key`.
    """

    def __init__(self, run_key: str) -> None:
        self._anchor = RunAnchor(run_key)

    def on_event(self, event: Event) -> None:
        """Ignore the event."""

    def close(self) -> None:
        """Release the copies."""
        self._anchor.close()
