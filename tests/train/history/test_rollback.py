"""Tests of the decisions about a rollback, without a run."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import pytest

from drawbar._records.rollback import Rollback, decide_rollback, find_positions
from drawbar._recovery.decisions import GiveUp, Restart, decide_after_failure
from drawbar.train import FailureConfig


@dataclass
class Committed:
    name: str
    attempt: int


def decide(committed: list[str], to: int, attempt: int = 0, position: int = 0) -> Rollback:
    return decide_rollback(
        committed,
        attempt=attempt,
        reason="nan",
        skip=1,
        to=to,
        report_index=9,
        data_positions={"loader": position},
    )


@pytest.mark.parametrize(
    ("committed", "to", "checkpoint", "discarded"),
    [
        (["a", "b", "c"], 1, "c", []),
        (["a", "b", "c"], 2, "b", ["c"]),
        (["a", "b", "c"], 9, "a", ["b", "c"]),
        ([], 1, "", []),
    ],
)
def test_decide_rollback_returns_target(
    committed: list[str], to: int, checkpoint: str, discarded: list[str]
) -> None:
    rollback = decide(committed, to)
    assert (rollback.checkpoint, rollback.discarded) == (checkpoint, discarded)


def test_find_positions_ignores_rollback_to_an_earlier_checkpoint_of_the_same_name() -> None:
    rollbacks = [decide(["a", "b"], 1, 0, 5), decide(["a", "b"], 2, 1, 7)]
    assert find_positions(rollbacks, Committed("b", 0)) == {"loader": 5}
    assert find_positions(rollbacks, Committed("a", 0)) == {"loader": 7}
    assert find_positions(rollbacks, Committed("b", 2)) is None
    assert rollbacks[1].discards(Committed("b", 1))
    assert not rollbacks[1].discards(Committed("b", 2))


def test_decide_after_rollback_uses_its_own_budget() -> None:
    config = FailureConfig(max_rollbacks=1)
    decision = decide_after_failure("rollback", Counter(), config)
    assert isinstance(decision, Restart)
    assert decision.budget == "max_rollbacks: 0 of 1 left"
    decision = decide_after_failure("rollback", decision.failure_counts, config)
    assert decision == GiveUp("FailureConfig.max_rollbacks=1 is used up")
    assert isinstance(decision, GiveUp)
    assert not decision.should_retry
