"""What integrations use around `report()`, for checkpoints of ranks that go their own ways."""

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


def test_ranks_that_reported_unequally_often_meet_again(run_config: RunConfig) -> None:
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


def test_ranks_that_load_together_have_the_checkpoint_that_one_of_them_has_just_made(
    run_config: RunConfig,
) -> None:
    def function() -> list[str]:
        found = []
        for step in range(20):
            if get_context().get_world_rank() == 0:
                save(f"step-{step}")
            else:  # which waits for nothing
                train.report({"step": step})
            checkpoint = get_agreed_checkpoint()
            assert checkpoint is not None
            found.append(Path(checkpoint).name)
        return found

    result = run_in_threads(function, num_workers=2, run_config=run_config)
    assert result.return_values == [[f"step-{step}" for step in range(20)]] * 2


def test_ranks_that_decide_by_the_list_decide_alike(run_config: RunConfig) -> None:
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


def test_a_rank_that_has_finished_is_not_waited_for(run_config: RunConfig) -> None:
    def function() -> int:
        if get_context().get_world_rank() == 1:
            train.report({})
        return len(train.get_all_reported_checkpoints())

    assert run_in_threads(function, run_config=run_config).return_values == [0, 0]


def test_a_discarded_checkpoint_is_gone_but_never_the_newest(run_config: RunConfig) -> None:
    def function() -> list[str]:
        for name in "abc":
            save(name)
        for name in ("a", "c", "nothing"):
            discard_checkpoint(name)
        kept = train.get_all_reported_checkpoints()
        return [Path(each.checkpoint).name for each in kept]

    result = run_in_threads(function, num_workers=1, run_config=run_config)
    assert result.return_value == ["b", "c"]
    assert not (Path(result.path) / "a").exists()
    assert result.checkpoint is not None
    assert Path(result.checkpoint).name == "c"


def test_it_goes_beside_the_runs_own_retention(run_config: RunConfig) -> None:
    def function() -> list[str]:
        for name in "abcd":
            save(name)
            discard_checkpoint("b")
        kept = train.get_all_reported_checkpoints()
        return [Path(each.checkpoint).name for each in kept]

    config = replace(run_config, checkpoint_config=CheckpointConfig(num_to_keep=3))
    result = run_in_threads(function, num_workers=1, run_config=config)
    assert result.return_value == ["a", "c", "d"]
