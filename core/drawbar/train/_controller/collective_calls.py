"""Collective calls that some ranks have not made yet."""

from __future__ import annotations

from collections.abc import Mapping

from drawbar.train._protocol.messages import CollectiveCalled, CollectiveKind
from drawbar.train._serialization import Serialized
from drawbar.train._storage.sizes import format_exact_size

MAX_RESULT_BYTES = 1_000_000_000
"""Maximum size of the serialized result of a collective, which every rank receives."""


class CollectiveCalls:
    """Collective calls by rank, until all ranks have made the same call.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._calls: dict[int, CollectiveCalled] = {}
        # By sequence number and kind. Two entries prove a divergence.
        self._num_ranks: dict[tuple[int, CollectiveKind], int] = {}

    def add(self, rank: int, call: CollectiveCalled) -> dict[int, CollectiveCalled] | None:
        """Add a call. Return the calls of all ranks if this one completes the collective."""
        previous = self._calls.get(rank)
        # A rank whose call has timed out may make another one.
        if previous is not None:
            self._remove(previous)
        self._calls[rank] = call
        key = call.sequence, call.kind
        self._num_ranks[key] = self._num_ranks.get(key, 0) + 1
        if len(self._calls) < self._world_size or self.has_different_calls:
            return None
        calls, self._calls = self._calls, {}
        self._num_ranks.clear()
        return calls

    def _remove(self, call: CollectiveCalled) -> None:
        key = call.sequence, call.kind
        self._num_ranks[key] -= 1
        if not self._num_ranks[key]:
            del self._num_ranks[key]

    @property
    def has_different_calls(self) -> bool:
        """True if two ranks wait in different collectives."""
        return len(self._num_ranks) > 1

    @property
    def sequence(self) -> int:
        """Sequence number of the collective that ranks wait in, if it is only one; -1 if none."""
        return next(iter(self._num_ranks))[0] if self._num_ranks else -1


def get_collective_name(call: CollectiveCalled) -> str:
    """Return the name of the function that made a collective call."""
    is_public = call.kind in ("barrier", "broadcast_from_rank_zero", "all_gather")
    return call.kind if is_public else "should_checkpoint"


def collect_payloads(calls: Mapping[int, CollectiveCalled]) -> tuple[Serialized, ...]:
    """Return the payloads that the ranks of a complete collective receive, in rank order.

    The payloads are not deserialized: only ranks deserialize user objects.

    Raises:
        ValueError: The payloads are larger than `MAX_RESULT_BYTES`.
    """
    # Without the calls that have no payload: all of a barrier, and all but one of a broadcast.
    payloads = tuple(call.payload for _, call in sorted(calls.items()) if call.payload is not None)
    size = sum(payload.size for payload in payloads)
    if size > MAX_RESULT_BYTES:
        call = calls[0]
        raise ValueError(
            f"{get_collective_name(call)}() at {call.location} has a result of "
            f"{format_exact_size(size)}, but every rank can receive at most "
            f"{format_exact_size(MAX_RESULT_BYTES)}. Pass smaller values, save them in a "
            "checkpoint, or use a collective of the framework, such as "
            "torch.distributed.all_gather."
        )
    return payloads
