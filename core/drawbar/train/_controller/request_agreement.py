"""Agree with all ranks on the call from which a request takes effect. No Ray, I/O, or clock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from drawbar._process.errors import PreemptionInfo
from drawbar.train._protocol.commands import (
    Command,
    ControllerRequests,
    RequestAgreed,
    RequestAnnounced,
)
from drawbar.train._protocol.messages import RequestSeen


class RequestAgreement:
    """Requests to the ranks of one attempt, one at a time. See `rank_requests.py`.

    Ranks that have returned do not take part. A rank whose function has not started receives the
    request at its start, and the other ranks wait for its reply.

    Args:
        world_size: Number of ranks.
        broadcast: Sends a command to several ranks.

    Attributes:
        latest: Latest requests, which ranks may not have received yet.
        is_unused: True after an agreement if no rank has called `should_checkpoint()`, so that
            nothing may be saved on request.
        positions: By rank that has replied to the latest request: number of the next call of
            `should_checkpoint()`, and index of the next report.
        is_saving: Whether a rank that has replied is saving.
        longest_interval: Longest time in seconds between two calls of a rank.
    """

    def __init__(
        self, world_size: int, broadcast: Callable[[Collection[int], Command], None]
    ) -> None:
        self.latest = ControllerRequests()
        self._first_report = 0  # that can have the checkpoint; 0: any, because no rank asks
        self.is_unused = False
        self._broadcast = broadcast
        self._running = set(range(world_size))
        self._started: set[int] = set()
        self._request_id = 0
        self._announced: ControllerRequests | None = None
        self._agreed = RequestAgreed(request_id=0, call=0, requests=self.latest)
        self.positions: dict[int, tuple[int, int]] = {}
        self.is_saving = False
        self.longest_interval = 0.0

    def request(
        self, *, preemption: PreemptionInfo | None = None, is_repeated: bool = False
    ) -> None:
        """Request a checkpoint, and announce a preemption if there is one.

        Args:
            preemption: Preemption to announce.
            is_repeated: Whether all ranks reply even if the request is not new: since the first
                one, they may have called `should_checkpoint()`.
        """
        requests = ControllerRequests(
            should_checkpoint=True, preemption=preemption or self.latest.preemption
        )
        if requests != self.latest or is_repeated:
            self.latest = requests
            if self._announced is None:
                self._announce()

    @property
    def is_pending(self) -> bool:
        """True if not all ranks have replied to the latest request."""
        return self._announced is not None

    def is_served_by(self, report_index: int) -> bool:
        """Return whether the checkpoint of a report is the requested one, not of an earlier step.

        If no rank has called `should_checkpoint()`, any checkpoint after the agreement serves.
        """
        return self.latest == self._agreed.requests and report_index >= self._first_report

    def _announce(self) -> None:
        self._request_id += 1
        self._announced = self.latest
        self.is_unused = False
        self.positions, self.is_saving = {}, False
        self._broadcast(
            sorted(self._started & self._running), RequestAnnounced(request_id=self._request_id)
        )

    def on_started(self, rank: int) -> None:
        """Record that the training function of a rank starts, also in a new process."""
        self._started.add(rank)
        if self._agreed.request_id:  # a process that has died had received it
            self._broadcast([rank], RequestAnnounced(request_id=self._agreed.request_id))
            self._broadcast([rank], self._agreed)
        if self._announced is not None:
            self._broadcast([rank], RequestAnnounced(request_id=self._request_id))

    def on_lost(self, rank: int) -> None:
        """Record the death of a rank that is replaced. Its new process receives requests later."""
        self._started.discard(rank)

    def on_seen(self, rank: int, message: RequestSeen, next_report: int) -> None:
        """Record the reply of a rank, and the index of its next report."""
        if rank in self._running and message.request_id == self._request_id:
            self.positions.setdefault(rank, (message.call, next_report))
            self.is_saving |= message.is_saving
            self.longest_interval = max(self.longest_interval, message.longest_interval)
            self._agree_if_complete()

    def on_finished(self, rank: int) -> None:
        """Record that the training function of a rank has returned."""
        self._running.discard(rank)
        self.positions.pop(rank, None)
        self._agree_if_complete()

    def _agree_if_complete(self) -> None:
        requests = self._announced
        if requests is None or not self._running or self.positions.keys() != self._running:
            return
        self._announced = None
        call = max(call for call, _ in self.positions.values())
        self.is_unused = call == 1
        # After a repeated request, the checkpoint of the first one serves, too.
        is_new = requests != self._agreed.requests
        self._agreed = RequestAgreed(request_id=self._request_id, call=call, requests=requests)
        if is_new and not self.is_unused:
            self._first_report = max(report for _, report in self.positions.values())
        self._broadcast(sorted(self._running), self._agreed)
        if self.latest != requests:
            self._announce()


class StopRequested(NamedTuple):
    """Event: stop the run. `save` is as in `Controller.stop`."""

    save: bool | None


class RepliesDue(NamedTuple):
    """Event: all ranks should have replied to a request.

    Attributes:
        previous: `RequestAgreement.positions` of the previous request, if there is one.
    """

    requests: RequestAgreement
    previous: Mapping[int, tuple[int, int]] | None = None
