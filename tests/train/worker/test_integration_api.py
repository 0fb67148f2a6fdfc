"""Tests of drawbar._backend_api.worker_functions with ranks that report differently."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from drawbar import train
from drawbar.train import CheckpointConfig, RunConfig, get_context
from drawbar.train.backend import discard_checkpoint, get_agreed_checkpoint, sync_report_index
from drawbar.train.testing import run_in_threads


def save(name: str) -> None:
    with train.checkpoint_dir() as path:
        (path / "model").write_text(name)
        train.report({"name": name}, checkpoint=path, checkpoint_dir_name=name)


def test_sync_report_index_after_unequal_reports_merges_checkpoint(run_config: RunConfig) -> None:
    def function() -> list[str]:
        rank = get_context().get_world_rank()
        for step in range(3 * rank):
            train.report({"step": step})
        sync_report_index()
        with train.checkpoint_dir() as path:
            (path / f"{rank}").touch()
            train.report({"rank": rank}, checkpoint=path)
        checkpoint = train.get_checkpoint()
        assert checkpoint is not None
        return sorted(file.name for file in Path(checkpoint).glob("[0-9]"))

    result = run_in_threads(function, num_workers=3, run_config=run_config)
    assert result.return_values == [["0", "1", "2"]] * 3


def test_get_agreed_checkpoint_returns_new_checkpoint_on_all_ranks(
    run_config: RunConfig,
) -> None:
    def function() -> list[str]:
        names = []
        for step in range(20):
            if get_context().get_world_rank() == 0:
                save(f"step-{step}")
            else:  # a report without a checkpoint does not wait
                train.report({"step": step})
            checkpoint = get_agreed_checkpoint()
            assert checkpoint is not None
            names.append(Path(checkpoint).name)
        return names

    result = run_in_threads(function, num_workers=2, run_config=run_config)
    assert result.return_values == [[f"step-{step}" for step in range(20)]] * 2


def test_get_all_reported_checkpoints_returns_same_list_on_all_ranks(run_config: RunConfig) -> None:
    def function() -> list[int]:
        rank, lengths = get_context().get_world_rank(), []
        for step in range(20):
            if rank == 0:
                save(f"{step}")
            else:
                train.report({"step": step})
            lengths.append(len(train.get_all_reported_checkpoints()))
        return lengths

    result = run_in_threads(function, num_workers=3, run_config=run_config)
    assert result.return_values == [[*range(1, 21)]] * 3


def test_get_all_reported_checkpoints_ignores_finished_ranks(run_config: RunConfig) -> None:
    def function() -> int:
        if get_context().get_world_rank() == 1:
            train.report({})
        return len(train.get_all_reported_checkpoints())

    assert run_in_threads(function, run_config=run_config).return_values == [0, 0]


def test_discard_checkpoint_deletes_all_but_the_latest(run_config: RunConfig) -> None:
    def function() -> list[str]:
        for name in "abc":
            save(name)
        for name in ("a", "c", "nothing"):
            discard_checkpoint(name)
        reported = train.get_all_reported_checkpoints()
        return [Path(entry.checkpoint).name for entry in reported]

    result = run_in_threads(function, num_workers=1, run_config=run_config)
    assert result.return_value == ["b", "c"]
    assert not (Path(result.path) / "a").exists()
    assert result.checkpoint is not None
    assert Path(result.checkpoint).name == "c"


def test_discard_checkpoint_works_with_retention_policy(run_config: RunConfig) -> None:
    def function() -> list[str]:
        for name in "abcd":
            save(name)
            discard_checkpoint("b")
        reported = train.get_all_reported_checkpoints()
        return [Path(entry.checkpoint).name for entry in reported]

    config = replace(run_config, checkpoint_config=CheckpointConfig(num_to_keep=3))
    result = run_in_threads(function, num_workers=1, run_config=config)
    assert result.return_value == ["a", "c", "d"]
