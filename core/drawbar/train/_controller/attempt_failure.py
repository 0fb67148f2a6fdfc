"""Collect the failures of an attempt and wait for their root cause."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field

from drawbar.train._history.events import AttemptEndCause
from drawbar.train._protocol.messages import (
    FunctionFailed,
    GroupMessage,
    RankFailed,
    RankFinished,
    WorkerDied,
)
from drawbar.train._worker_failure import WorkerFailure

PEER_DEATH_WAIT_S = 2.0
"""Time to wait for the death of a rank after a peer has reported a lost connection."""

EXIT_SECONDS = 2.0
"""Time that rank 0 has to end by itself after another rank has exited, before it is stopped."""

# Messages of gloo, NCCL, PyTorch's store, gRPC (JAX, TensorFlow), and sockets.
_CONNECTION_LOST = re.compile(
    r"closed by (the )?(remote )?peer|reset by peer|broken pipe|socket closed|remote process exited"
    r"|connection (was likely closed|refused)|\bUNAVAILABLE\b",
    re.IGNORECASE,
)


@dataclass
class AttemptFailure(Exception):
    """Failure that ended an attempt.

    Attributes:
        cause: Kind of failure.
        failures: Failures of the ranks.
        deaths: Processes that died, by rank.
        exception: Exception in the driver; None if workers failed.
        failure_times: Times at which training functions raised, by rank.
        started: Start time of the attempt if its workers did not start, otherwise 0.
        returned: Ranks whose function has returned.
    """

    cause: AttemptEndCause
    failures: list[WorkerFailure] = field(default_factory=list)
    deaths: dict[int, WorkerDied] = field(default_factory=dict)
    exception: Exception | None = None
    failure_times: dict[int, float] = field(default_factory=dict)
    started: float = 0.0
    returned: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()

    def on_message(self, rank: int, message: GroupMessage) -> None:
        """Add a message that arrives after the first failure."""
        match message:
            case RankFailed():
                self.failures.append(message.failure)
            case FunctionFailed():
                self.failure_times[rank] = message.time
            case RankFinished():
                self.returned.add(rank)
            case WorkerDied():
                # Describe it later: its exit report may take two seconds, and this runs on the
                # event loop.
                self.deaths[rank] = message
        self._changed.set()

    async def wait_for_root_cause(self, timeout: float) -> None:
        """Wait for the failures of the ranks that raised first.

        The first failure to arrive may be a consequence of another one. When a rank raises, its
        peers fail in a collective while it still cleans up, and its own failure is sent after that.
        When a process is killed, its peers notice it before Ray reports it.

        Args:
            timeout: Maximum time in seconds for each of both cases.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(timeout, PEER_DEATH_WAIT_S)):
                while self._is_missing_peer_death():
                    self._changed.clear()
                    await self._changed.wait()
        with contextlib.suppress(TimeoutError):
            # A rank that hangs in its clean-up may never send its failure.
            async with asyncio.timeout(timeout):
                while self._has_earlier_failure():
                    self._changed.clear()
                    await self._changed.wait()

    async def wait_for_rank_zero_exit(self) -> None:
        """Wait until rank 0 has ended by itself, if so far only other ranks have exited.

        All ranks reject wrong arguments in the same way, but the output of rank 0 is the one that
        is shown, and rank 0 may be the last to get there.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(EXIT_SECONDS):
                while self._only_other_ranks_exited():
                    self._changed.clear()
                    await self._changed.wait()

    def _only_other_ranks_exited(self) -> bool:
        exits = all(failure.kind == "exit" and failure.rank > 0 for failure in self.failures)
        return bool(self.failures) and exits and not self.deaths and 0 not in self.returned

    def _is_missing_peer_death(self) -> bool:
        """Return whether all failures are lost connections, but no death is reported."""
        are_lost_connections = all(
            _CONNECTION_LOST.search(failure.message) for failure in self.failures
        )
        return bool(self.failures) and are_lost_connections and not self.deaths

    def _has_earlier_failure(self) -> bool:
        """Return whether a rank raised before all known failures and has not sent its own yet."""
        known_times = {failure.rank: failure.time for failure in self.failures}
        first = min(known_times.values(), default=0.0)
        known = known_times.keys() | self.deaths.keys()
        return any(at < first and rank not in known for rank, at in self.failure_times.items())
