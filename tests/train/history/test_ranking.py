"""Tests of drawbar._records.ranking."""

import random
from typing import Any

import msgspec
import pytest

from drawbar._records.checkpoint_config import CheckpointConfig
from drawbar._records.ranking import (
    SurplusQueue,
    describe_missing_scores,
    find_best_of_framework,
    get_score,
    rank_checkpoints,
    select_surplus,
)
from drawbar._storage.manifest import Manifest, Validation


def _checkpoint(name: str, index: int, metrics: dict[str, Any]) -> Manifest:
    return Manifest(
        name=name,
        index=index,
        attempt=0,
        run_id="ab",
        world_size=1,
        time=0.0,
        files=(),
        metrics=metrics,
    )


def by_index(**metrics: list[Any]) -> list[Manifest]:
    """Return one checkpoint per value, with indices from 0. None omits the metric."""
    ((name, values),) = metrics.items()
    return [
        _checkpoint(name=f"c{i}", index=i, metrics={} if v is None else {name: v})
        for i, v in enumerate(values)
    ]


@pytest.mark.parametrize(
    ("metrics", "attribute", "expected"),
    [
        ({"loss": 2}, "loss", 2.0),
        ({"eval": {"loss": 0.5}}, "eval/loss", 0.5),
        ({"eval/loss": 1.0, "eval": {"loss": 0.5}}, "eval/loss", 1.0),
        ({"a/b": {"c": 3}}, "a/b/c", 3.0),
        ({"loss": float("-inf")}, "loss", float("-inf")),
        ({"loss": float("nan")}, "loss", None),
        ({"loss": -(10**400)}, "loss", None),
        ({"loss": "low"}, "loss", None),
        ({"loss": None}, "loss", None),
        ({"eval": {"loss": 0.5}}, "eval", None),
        ({}, "loss", None),
    ],
)
def test_get_score_looks_up_metric(
    metrics: dict[str, Any], attribute: str, expected: float | None
) -> None:
    assert get_score(metrics, attribute) == expected


@pytest.mark.parametrize(
    ("losses", "order", "worst_to_best"),
    [
        ([3, 1, 2], "max", [1, 2, 0]),
        ([3, 1, 2], "min", [0, 2, 1]),
        ([1, None, 2], "max", [1, 0, 2]),
        ([1, None, 2], "min", [1, 2, 0]),
        ([1, float("nan")], "min", [1, 0]),
        ([1, 1, 1], "max", [0, 1, 2]),
        ([1, 1, 1], "min", [0, 1, 2]),
        ([None, None], "min", [0, 1]),
    ],
)
def test_rank_checkpoints_sorts_from_worst_to_best(
    losses: list[float | None], order: Any, worst_to_best: list[int]
) -> None:
    config = CheckpointConfig(checkpoint_score_attribute="loss", checkpoint_score_order=order)
    manifests = list(reversed(by_index(loss=losses)))
    assert [checkpoint.index for checkpoint in rank_checkpoints(manifests, config)] == worst_to_best


def test_rank_checkpoints_without_score_sorts_by_age() -> None:
    checkpoints = rank_checkpoints(by_index(loss=[9, 1, 5])[::-1], CheckpointConfig())
    assert [checkpoint.index for checkpoint in checkpoints] == [0, 1, 2]


@pytest.mark.parametrize(
    ("losses", "num_to_keep", "deleted"),
    [
        ([], 1, []),
        ([3, 1, 2], None, []),
        ([3, 1, 2], 3, []),
        ([3, 1, 2], 2, [0]),
        ([3, 1, 2], 1, [0]),  # 1 is the best, 2 the newest
        ([1, 2, 3], 1, [1]),
        ([3, 2, 1], 1, [0, 1]),  # the newest is the best
        ([1, None, None], 1, [1]),
        ([None, None, None], 1, []),  # later checkpoints may have the score
        ([float("nan"), None], 1, []),
        ([None, None, 3], 1, [0, 1]),
    ],
)
def test_select_surplus_keeps_best_and_newest(
    losses: list[float | None], num_to_keep: int | None, deleted: list[int]
) -> None:
    config = CheckpointConfig(
        num_to_keep=num_to_keep, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )
    assert [c.index for c in select_surplus(by_index(loss=losses), config)] == deleted


@pytest.mark.parametrize(
    ("losses", "pending", "deleted"),
    [
        ([1, 2, 3], [0, 1, 2], []),
        ([3, 2, None], [0], []),  # 1 is the best, 2 the newest
        ([3, 2, None], [2], [0]),
        ([3, 2, 1], [2], [0]),  # the validation of 2 may give it a worse score than 1
        ([3, 1, 2, None], [1, 3], [0]),
    ],
)
def test_select_surplus_ignores_pending_validations(
    losses: list[float | None], pending: list[int], deleted: list[int]
) -> None:
    config = CheckpointConfig(
        num_to_keep=1, checkpoint_score_attribute="loss", checkpoint_score_order="min"
    )
    checkpoints = [
        msgspec.structs.replace(manifest, validation=Validation())
        if manifest.index in pending
        else manifest
        for manifest in by_index(loss=losses)
    ]
    assert [c.index for c in select_surplus(checkpoints, config)] == deleted


@pytest.mark.parametrize("seed", range(50))
def test_surplus_queue_selects_the_same_as_a_sort(seed: int) -> None:
    generator = random.Random(seed)
    config = CheckpointConfig(
        num_to_keep=generator.randint(1, 5),
        checkpoint_score_attribute=generator.choice([None, "loss"]),
        checkpoint_score_order=generator.choice(["min", "max"]),
    )
    queue, checkpoints = SurplusQueue(config), dict[str, Manifest]()
    for index in range(100):
        metrics = {"loss": generator.randint(0, 3)} if generator.random() < 0.5 else {}
        manifest = _checkpoint(f"c{index}", index, metrics)
        if generator.random() < 0.3:
            manifest = msgspec.structs.replace(manifest, validation=Validation())
        changed = [manifest]
        for earlier in checkpoints.values():
            if earlier.validation is not None and generator.random() < 0.3:  # it is validated
                changed.append(msgspec.structs.replace(earlier, validation=None))
        for manifest in changed:
            checkpoints[manifest.name] = manifest
            queue.add(manifest)
        if generator.random() < 0.1:
            discarded = generator.choice(list(checkpoints)[:-1] or ["unknown"])
            checkpoints.pop(discarded, None)
            queue.remove(discarded)
        settled = [checkpoint for checkpoint in checkpoints.values() if not checkpoint.validation]
        expected = [c.name for c in rank_checkpoints(settled, config)[: -(config.num_to_keep or 0)]]
        if config.checkpoint_score_attribute and not any(c.metrics for c in settled):
            expected = []
        expected = [name for name in expected if name != f"c{index}"]
        assert queue.pop_surplus(f"c{index}") == expected
        for name in expected:
            del checkpoints[name]


@pytest.mark.parametrize(
    ("losses", "attribute", "expected"),
    [
        ([], "loss", None),
        ([None, 1], "loss", None),
        ([1, 2], "los", "c1 does not have this metric. There are 'loss'; did you mean 'loss'?"),
        ([1, None], "los", "c1 does not have this metric. There are no metrics"),
        ([1, {"train": 2}], "loss", None),
        ([None, {"train": 2}], "loss/val", "There are 'loss/train'"),
        ([None, float("nan")], "loss", "c1 has the value nan, which cannot be ranked"),
    ],
)
def test_describe_missing_scores_lists_available_metrics(
    losses: list[Any], attribute: str, expected: str | None
) -> None:
    config = CheckpointConfig(checkpoint_score_attribute=attribute)
    message = describe_missing_scores(by_index(loss=losses), config)
    assert message is None if expected is None else message is not None and expected in message


def test_describe_missing_scores_ignores_pending_validation() -> None:
    config = CheckpointConfig(checkpoint_score_attribute="accuracy")
    (pending,) = by_index(loss=[1])
    pending = msgspec.structs.replace(pending, validation=Validation())
    assert describe_missing_scores([pending], config) is None


def test_find_best_of_framework_uses_newest_checkpoint_that_names_any() -> None:
    checkpoints = by_index(step=[1, 2, 3, 4, 5])
    assert find_best_of_framework(checkpoints) == set()
    for index, positions in (
        (1, {"best checkpoint-1": "c1"}),
        (3, {"best checkpoint-1": "c0", "best checkpoint-2": {"step": 3}, "rows": {"step": 2}}),
    ):
        checkpoints[index] = msgspec.structs.replace(checkpoints[index], data_positions=positions)
    assert find_best_of_framework(checkpoints) == {"c0", "c2"}
    checkpoints[3] = msgspec.structs.replace(
        checkpoints[3],
        data_positions={"best checkpoint-1": {"step": 9}},  # deleted
    )
    assert find_best_of_framework(checkpoints) == set()
