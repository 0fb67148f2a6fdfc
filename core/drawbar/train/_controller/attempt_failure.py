"""How an attempt failed: what one rank has told ends it, and what others tell is gathered."""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass, field

from drawbar.train._errors import WorkerFailure
from drawbar.train._history.events import AttemptEndCause
from drawbar.train._messages import Failed, Finished, FunctionRaised, Gone, Message

PEER_DEATH_WAIT_S = 2.0
"""How long a rank's death is waited for, once a peer says that its connection has broken."""

EXIT_SECONDS = 2.0
"""Time that rank 0 has to end by itself after another rank has exited, before it is stopped."""

# As gloo, NCCL, PyTorch's store, gRPC (JAX, TensorFlow) and the sockets of the system say it.
_CONNECTION_LOST = re.compile(
    r"closed by (the )?(remote )?peer|reset by peer|broken pipe|socket closed|remote process exited"
    r"|connection (was likely closed|refused)|\bUNAVAILABLE\b",
    re.IGNORECASE,
)


@dataclass
class AttemptFailure(Exception):
    """The attempt is over before its end.

    Attributes:
        end: How it ended.
        failures: Failures of the ranks.
        gone: Processes that died, by rank.
        cause: Exception in the driver; None if workers failed.
        raised: When functions raised, by rank.
        returned: Ranks whose function has returned.
        started: When the attempt began, if its workers did not start; else 0.
    """

    cause: AttemptEndCause
    failures: list[WorkerFailure] = field(default_factory=list)
    deaths: dict[int, Gone] = field(default_factory=dict)
    exception: Exception | None = None
    failure_times: dict[int, float] = field(default_factory=dict)
    started: float = 0.0
    returned: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._changed = asyncio.Event()

    def on_message(self, rank: int, message: Message) -> None:
        """Take what a rank says after the first has told."""
        match message:
            case Failed():
                self.failures.append(message.failure)
            case FunctionRaised():
                self.failure_times[rank] = message.time
            case Finished():
                self.returned.add(rank)
            case Gone():
                # Not described yet: its exit report may take two seconds, and this runs on the
                # event loop.
                self.deaths[rank] = message
        self._changed.set()

    async def wait_for_root_cause(self, patience: float) -> None:
        """Wait until those have told how they failed whose functions had raised first.

        What a rank tells may have come of another's failure, which is still on its way: peers fail
        in a collective while the one to blame lets go of them, and it tells only then. Of a process
        that was killed Ray tells, and its peers feel it sooner.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(patience, PEER_DEATH_WAIT_S)):
                while self._is_missing_peer_death():
                    self._changed.clear()
                    await self._changed.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                # Not longer: a rank that hangs in its clean-up may never tell.
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
        """Whether all that is known comes of a peer that is gone, and none is said to be."""
        blamed = all(_CONNECTION_LOST.search(failure.message) for failure in self.failures)
        return bool(self.failures) and blamed and not self.deaths

    def _has_earlier_failure(self) -> bool:
        """Whether a rank has raised before all that have told, and has not told yet."""
        told = {failure.rank: failure.time for failure in self.failures}
        first = min(told.values(), default=0.0)
        known = told.keys() | self.deaths.keys()
        return any(at < first and rank not in known for rank, at in self.failure_times.items())
