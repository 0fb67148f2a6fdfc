"""`PreemptionInfo`: nodes of a run that will be preempted."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class PreemptionInfo:
    """Nodes of the run that will be preempted.

    Attributes:
        deadline_ms: Time at which the nodes stop, in milliseconds since the epoch; None if unknown.
        preempted_node_to_ranks: Ranks on these nodes, by node id.

    Example:
        info = train.get_preemption_info()
        if info is not None:
            print(f"ranks {info.preempted_ranks} stop at {info.deadline_ms}")
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
