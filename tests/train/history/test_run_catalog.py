"""Tests of `drawbar.train.runs.RunCatalog` and of functions for single runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from drawbar import train
from drawbar.train import runs
from tests.train.runs import fit


def train_func(config: dict[str, int]) -> None:
    for step in range(config["steps"]):
        with train.checkpoint_dir() as path:
            (path / "model").write_text("weights")
            train.report({"loss": 1 / (step + 1)}, checkpoint=path)


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    fit(train_func, tmp_path, {"steps": 2}, name="a")
    fit(train_func, tmp_path, {"steps": 1}, name="group/b")
    return tmp_path


def test_run_catalog_lists_runs_of_storage_and_of_run_directories(storage: Path) -> None:
    catalog = runs.RunCatalog([storage, storage / "group" / "b", storage / "missing"])

    assert [run.name for run in catalog.list_runs()] == ["a", "group/b"]
    assert len(catalog.errors) == 1
    assert "missing does not exist" in catalog.errors[0]


def test_run_catalog_reads_only_changed_runs_again(storage: Path) -> None:
    catalog = runs.RunCatalog([storage])
    first_a, first_b = catalog.list_runs()

    fit(train_func, storage, {"steps": 3}, name="a")
    a, b = catalog.list_runs()

    assert b is first_b
    assert a is not first_a
    assert a.metrics == {"loss": 1 / 3}
    assert catalog.refresh(first_a) is a


def test_run_catalog_with_damaged_and_deleted_runs(storage: Path) -> None:
    catalog = runs.RunCatalog([storage])
    catalog.list_runs()

    (storage / "a" / "journal.jsonl").write_bytes(b"\xff\n")
    (storage / "group" / "b").rename(storage / "moved")
    damaged, moved = catalog.list_runs()

    assert (damaged.name, moved.name) == ("a", "moved")
    assert damaged.damage


def test_list_events_returns_json_values(storage: Path) -> None:
    events = runs.find_run(storage / "a").list_events()

    assert [event["event"] for event in events][:2] == ["run_started", "attempt_started"]
    assert events[-1]["event"] == "run_ended"


def test_verify_checkpoint_describes_damage(storage: Path) -> None:
    run = runs.find_run(storage / "a")
    name = run.list_checkpoints()[-1].name
    assert run.verify_checkpoint(name) == ""

    (storage / "a" / name / "model").write_text("changed")

    assert "model" in run.verify_checkpoint(name)
