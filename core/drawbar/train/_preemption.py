"""What the controller wishes of the ranks: a checkpoint, because nodes go or the run is to stop."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PreemptionInfo:
    """Nodes of this run that are about to be taken away.

    Attributes:
        deadline_ms: Until when they stay, in milliseconds since the epoch; None if it is not known.
        preempted_node_to_ranks: The ranks on each of these nodes, by node id.
    """

    deadline_ms: int | None
    preempted_node_to_ranks: dict[str, list[int]] = field(default_factory=dict)

    @property
    def preempted_node_ids(self) -> list[str]:
        """Ids of the nodes, sorted."""
        return sorted(self.preempted_node_to_ranks)

    @property
    def preempted_ranks(self) -> list[int]:
        """Ranks on these nodes, sorted."""
        return sorted(rank for ranks in self.preempted_node_to_ranks.values() for rank in ranks)


@dataclass(frozen=True)
class Wishes:
    """What the controller wants, the same for all ranks."""

    checkpoint: bool = False
    preemption: PreemptionInfo | None = None
