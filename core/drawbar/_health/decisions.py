"""Decisions about the health of a run, and evaluators, which make them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import ClassVar

from drawbar._health.probes import HealthState, OnDemandProbe


class Action(Enum):
    """Actions of decisions, the least severe first.

    Example: `decision.action is Action.EVICT`
    """

    NOOP = 0
    DIAGNOSE = 1
    REATTEMPT = 2
    EVICT = 3


class Cause(Enum):
    """Cause of a problem.

    Example: `Reattempt(Cause.APPLICATION, "NaN")`
    """

    UNKNOWN = 0
    HARDWARE = 1
    INFRASTRUCTURE = 2
    APPLICATION = 3
    NO_PROGRESS = 4


@dataclass
class HealthDecision:
    """Base class of decisions.

    Args:
        cause: Cause of the problem.
        reason: Evidence for users, in one sentence.

    Example: `print(decision.action.name, decision.reason)`
    """

    action: ClassVar[Action]
    cause: Cause = Cause.UNKNOWN
    reason: str = ""


@dataclass
class Noop(HealthDecision):
    """Do nothing.

    Args:
        cause: Cause of the problem.
        reason: Evidence for users, in one sentence.

    Example: `Noop()`
    """

    action: ClassVar[Action] = Action.NOOP


@dataclass
class Reattempt(HealthDecision):
    """Restart from the latest checkpoint. Counts as one of `FailureConfig.max_failures`.

    Args:
        cause: Cause of the problem.
        reason: Evidence for users, in one sentence.

    Example: `Reattempt(reason="the loss is NaN on rank 3")`
    """

    action: ClassVar[Action] = Action.REATTEMPT


@dataclass
class Evict(HealthDecision):
    """Leave nodes, and restart on the others from the latest checkpoint.

    Counts as one of `FailureConfig.max_preemption_failures`, which has no limit by default. If the
    other nodes have no room for the workers, the run ends.

    Args:
        cause: Cause of the problem.
        reason: Evidence for users, in one sentence.
        target_nodes: IDs of the nodes.

    Example: `Evict(target_nodes=[node_id], reason="91 degrees")`
    """

    action: ClassVar[Action] = Action.EVICT
    target_nodes: list[str] = field(default_factory=list)


@dataclass
class Diagnose(HealthDecision):
    """Run on-demand probes. The evaluators receive their results.

    Args:
        cause: Cause of the problem.
        reason: Evidence for users, in one sentence.
        on_demand_probes: The probes.
        target_nodes: IDs of the nodes. Default: nodes of `target_ranks`, or all nodes.
        target_ranks: Ranks whose nodes are probed.

    Example: `Diagnose(on_demand_probes=[AllReduceProbe()], reason="rank 3 is slow")`
    """

    action: ClassVar[Action] = Action.DIAGNOSE
    on_demand_probes: list[OnDemandProbe] = field(default_factory=list)
    target_nodes: list[str] = field(default_factory=list)
    target_ranks: list[int] = field(default_factory=list)


class Evaluator(ABC):
    """Concludes decisions from the results of probes. Lives as long as the run.

    Example:
        ```python
        class TooHot(Evaluator):
            def evaluate(self, state):
                found = state.results(Temperature)
                hot = [node for node in found if found[node].metrics["celsius"] > 90]
                return [Evict(target_nodes=hot)] if hot else []
        ```
    """

    @abstractmethod
    def evaluate(self, state: HealthState) -> list[HealthDecision]:
        """Return decisions.

        Args:
            state: Latest results of all probes.

        Returns:
            Decisions; empty if everything is well.
        """
