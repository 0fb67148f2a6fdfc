"""Tests of Ray Data shards as data of the Trainer: lengths, epochs, and resuming after a kill."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import ray

from drawbar import train

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

pytestmark = [
    pytest.mark.usefixtures("ray_cluster"),
    pytest.mark.filterwarnings(  # it warns of itself
        "ignore::DeprecationWarning:ray.data"
    ),
]


def dataset(rows: list[dict[str, Any]]) -> ray.data.Dataset:
    """Return rows in few blocks: Ray Data may run a task in a separate process for each block."""
    return ray.data.from_items(rows, override_num_blocks=2)


def make_recording_collator(seen: Path) -> Callable[[list[dict[str, Any]]], Any]:
    """Return a data collator that writes the IDs of each batch, except of evaluation rows."""
    from transformers import default_data_collator

    context = train.get_context()
    name = f"{context.get_world_rank()}-{context.get_attempt()}.jsonl"

    def collate(batch: list[dict[str, Any]]) -> Any:
        ids = [int(row.pop("id")) for row in batch]
        if ids[0] >= 0:
            with open(seen / name, "a") as file:
                file.write(json.dumps(ids) + "\n")
        return default_data_collator(batch)

    return collate


@pytest.mark.nightly
def test_shard_rows_after_kill_are_trained_once(tiny: Any, runs: Any, tmp_path: Path) -> None:
    rows, seen = tiny.windows(64), tmp_path / "seen"
    seen.mkdir()

    def function() -> Any:
        trainer = tiny.trainer(
            tmp_path / "output",
            train_dataset=train.get_dataset_shard("train"),
            eval_dataset=train.get_dataset_shard("eval"),
            max_steps=-1,
            num_train_epochs=2,
            save_strategy="steps",
            save_steps=3,
            eval_strategy="epoch",
            remove_unused_columns=False,
        )
        trainer.data_collator = make_recording_collator(seen)
        trainer = runs.on_ray(trainer, die_at=10)
        expected = sorted(row["labels"] for row in rows[:22])
        trainer.compute_metrics = lambda found: {
            "once": float(sorted(found.label_ids.tolist()) == expected)
        }
        trainer.train()
        halves = {"eval_dataset": rows[:22], "per_device_eval_batch_size": 11}
        plain = tiny.trainer(tmp_path / "plain", trainer.model, **halves)
        exact = plain.evaluate()["eval_loss"]
        history = trainer.state.log_history
        assert [log["eval_once"] for log in history if "eval_once" in log] == [1.0, 1.0]
        evaluated = [log["eval_loss"] for log in history if "eval_loss" in log]
        return trainer.state.max_steps, trainer.state.epoch, exact, evaluated

    result = runs.fit(
        function,
        tmp_path,
        datasets={
            "train": dataset([{**row, "id": i} for i, row in enumerate(rows)]),
            "eval": dataset([{**row, "id": -1} for row in rows[:22]]),
        },
    )
    max_steps, epoch, exact, evaluated = result.return_value
    assert (max_steps, epoch) == (16, 2.0)  # 64 rows, 2 workers, batches of 4, 2 epochs
    assert len(evaluated) == 2
    assert evaluated[-1] == pytest.approx(exact, abs=1e-5)
    assert_rows_were_trained_once_per_epoch(seen)


def assert_rows_were_trained_once_per_epoch(seen: Path) -> None:
    trained = []
    for rank in (0, 1):
        before, after = (read(seen / f"{rank}-{attempt}.jsonl") for attempt in (0, 1))
        assert len(before) >= 10
        trained.append(before[:9] + after)  # the latest checkpoint was saved at step 9
    epochs = [sorted(i for rank in trained for ids in rank[e : e + 8] for i in ids) for e in (0, 8)]
    assert epochs == [list(range(64))] * 2


def read(file: Path) -> list[list[int]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_shard_batches_with_max_steps_are_not_changed(tiny: Any, runs: Any, tmp_path: Path) -> None:
    def function() -> Any:
        batches = train.get_dataset_shard("train").iter_torch_batches(batch_size=4)
        trainer = tiny.trainer(tmp_path / "output", train_dataset=batches, max_steps=5)
        trainer = runs.on_ray(trainer)
        trainer.train()
        return tiny.losses(trainer)

    lazy = dataset(tiny.windows(16)).map(lambda row: row)
    result = runs.fit(function, tmp_path, 0, max_failures=0, datasets={"train": lazy})
    assert sorted(result.return_value) == [1, 2, 3, 4, 5]
