"""Tests of the decisions about a rollback, and of the checkpoints that it discards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar._records.rollback import Rollback, decide_rollback, find_positions
from drawbar._recovery.decisions import GiveUp, Restart, decide_after_failure
from drawbar.train import FailureConfig, Result, WorkerGroupError
from drawbar.train.backend import DataSource, register_data_position
from tests.train.runs import fit
from tests.train.text_checkpoints import content, save


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


def test_checkpoint_that_a_killed_driver_has_not_discarded_is_not_used(tmp_path: Path) -> None:
    def function(config: dict[str, bool]) -> str:
        register_data_position("batches", lambda: 0, skip_batches=lambda num_batches: num_batches)
        if train.get_checkpoint() is None:
            save("a")
            save("b")
            train.rollback("nan", to=2)
        if config["should_fail"]:
            raise RuntimeError("on purpose")
        return content(train.get_checkpoint())

    with pytest.raises(WorkerGroupError, match="on purpose"):
        fit(function, tmp_path, {"should_fail": True})
    run = tmp_path / "run"
    (moved,) = (run / "broken").iterdir()
    # The driver moves it after it has written the rollback to the journal.
    moved.rename(run / "checkpoint_000001")
    assert content(Result.from_path(run).checkpoint) == "a"
    assert fit(function, tmp_path, {"should_fail": False}).return_value == "a"
    assert not (run / "checkpoint_000001").exists()


class Numbers(DataSource):
    """The numbers below 8 for one rank, with positions that can be moved if `can_skip`."""

    def __init__(self, can_skip: bool) -> None:
        self.can_skip = can_skip

    def assign(
        self, node_ids: Sequence[str], positions: Mapping[str, object]
    ) -> list[Callable[[], dict[str, Any]]]:
        return [partial(open_numbers, self.can_skip)]


def open_numbers(can_skip: bool) -> dict[str, Any]:
    return {"train": NumberShard(can_skip)}


class NumberShard:
    def __init__(self, can_skip: bool) -> None:
        self.num_read = 0
        skip = self.skip if can_skip else None
        position = register_data_position("numbers", lambda: self.num_read, skip_batches=skip)
        self.num_read = position or 0

    def skip(self, num_batches: int) -> int:
        return self.num_read + num_batches

    def __iter__(self) -> Iterator[int]:
        while self.num_read < 8:
            self.num_read += 1
            yield self.num_read - 1


def read_numbers() -> list[int]:
    seen = []
    for number in train.get_dataset_shard("train"):
        seen.append(number)
        if number == 3:
            train.rollback("nan", skip=2)
        save(str(number))
    return seen


@pytest.mark.parametrize("can_skip", [True, False])
def test_rollback_skips_batches_of_a_data_source_that_supports_it(
    tmp_path: Path, can_skip: bool
) -> None:
    trainer = train.DataParallelTrainer(
        read_numbers,
        scaling_config=train.ScalingConfig(num_workers=0),
        run_config=train.RunConfig(name="run", storage_path=str(tmp_path)),
        datasets=Numbers(can_skip),
    )
    if can_skip:
        assert trainer.fit().return_value == [6, 7]
    else:
        with pytest.raises(WorkerGroupError, match=r"skip_batches=, not of .* found 'train'"):
            trainer.fit()
