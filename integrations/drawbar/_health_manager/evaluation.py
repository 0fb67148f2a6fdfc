"""The default evaluator, and the most severe of several decisions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from drawbar._health.decisions import (
    Action,
    Cause,
    Diagnose,
    Evaluator,
    Evict,
    HealthDecision,
)
from drawbar._health.probes import HealthState


class FailedProbeEvaluator(Evaluator):
    """Evicts each node with a result whose `passed` is False. The default of a policy.

    Example: `HealthPolicy(probe_creator=..., evaluators_creator=lambda: [FailedProbeEvaluator()])`
    """

    def evaluate(self, state: HealthState) -> list[HealthDecision]:
        """Return one `Evict` for each failed probe of a node."""
        return [
            Evict(Cause.HARDWARE, f"{probe.name or probe.__name__}: {result.detail}", [node])
            for probe, results in state.probe_results.items()
            for node, result in results.items()
            if result.passed is False
        ]


def merge_decisions(decisions: Iterable[HealthDecision]) -> HealthDecision | None:
    """Return the most severe decisions as one, None if there are only `Noop`."""
    found = [decision for decision in decisions if decision.action is not Action.NOOP]
    if not found:
        return None
    worst = max(found, key=lambda decision: decision.action.value)
    same = [decision for decision in found if decision.action is worst.action]
    reason = "; ".join(dict.fromkeys(decision.reason for decision in same if decision.reason))
    cause = next((each.cause for each in same if each.cause is not Cause.UNKNOWN), Cause.UNKNOWN)
    if isinstance(worst, Evict):
        return Evict(cause, reason, _unite([d.target_nodes for d in same if isinstance(d, Evict)]))
    if isinstance(worst, Diagnose):
        diagnoses = [decision for decision in same if isinstance(decision, Diagnose)]
        return Diagnose(
            cause,
            reason,
            [probe for each in diagnoses for probe in each.on_demand_probes],
            _unite([each.target_nodes for each in diagnoses]),
            _unite([each.target_ranks for each in diagnoses]),
        )
    return replace(worst, cause=cause, reason=reason)


def _unite(lists: Sequence[list[str]] | Sequence[list[int]]) -> list:  # type: ignore[type-arg]
    return list(dict.fromkeys(item for each in lists for item in each))
