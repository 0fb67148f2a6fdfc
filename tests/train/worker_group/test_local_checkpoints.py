"""Reports and checkpoints with `num_workers=0`, which are those of any run."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from drawbar import train
from drawbar.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    ControllerError,
    FailureConfig,
    Result,
    RunConfig,
    WorkerGroupError,
    collective,
)
from drawbar.train.testing import run_in_threads
from tests.train.local_runs import ASYNC, content, fit, save, save_asynchronously

if TYPE_CHECKING:
    from tests.train.conftest import Drivers


def test_reports_and_checkpoints_are_those_of_any_run(tmp_path: Path) -> None:
    def function() -> list[Any]:
        assert train.get_checkpoint() is None
        for text in "ab":
            train.report({"step": 1})
            save(text)
            assert content(train.get_checkpoint()) == text
        return train.get_all_reported_checkpoints()

    result = fit(function, tmp_path)
    found = [(content(each.checkpoint), each.metrics) for each in result.return_value]
    assert found == [("a", {"text": "a"}), ("b", {"text": "b"})]
    assert [Path(each.checkpoint).name for each in result.return_value] == [
        "checkpoint_000001",
        "checkpoint_000003",
    ]
    assert result.metrics == {"text": "b"}
    assert content(result.checkpoint) == "b"
    assert result.checkpoint is not None
    assert result.checkpoint.get_metadata() == {"by": "ann"}


def test_a_directory_of_the_user_is_copied(tmp_path: Path) -> None:
    own = tmp_path / "own"

    def function() -> None:
        own.mkdir()
        for text in "ab":
            (own / "model").write_text(text)
            train.report({}, checkpoint=own)

    result = fit(function, tmp_path)
    assert [content(checkpoint) for checkpoint, _ in result.best_checkpoints] == ["a", "b"]
    assert (own / "model").read_text() == "b"


def test_a_directory_that_is_handed_over_is_moved(tmp_path: Path) -> None:
    own = tmp_path / "own"

    def function() -> None:
        own.mkdir()
        (own / "model").write_text("a")
        train.report({}, checkpoint=own, delete_local_checkpoint_after_upload=True)

    assert content(fit(function, tmp_path).checkpoint) == "a"
    assert not own.exists()


@pytest.mark.parametrize("delete", [None, True, False])
def test_after_an_asynchronous_report_the_directory_may_be_written_again(
    tmp_path: Path, delete: bool | None
) -> None:
    own = tmp_path / "own"

    def function() -> None:
        for step in range(6):
            own.mkdir(exist_ok=True)
            (own / "model").write_text(f"{step} " * 1000 * (6 - step))
            train.report(
                {},
                checkpoint=own,
                checkpoint_upload_mode=ASYNC,
                delete_local_checkpoint_after_upload=delete,
            )

    result = fit(function, tmp_path)
    found = [content(checkpoint).split()[0] for checkpoint, _ in result.best_checkpoints]
    assert found == list("012345")


def test_asynchronous_checkpoints_are_committed_when_fit_returns(tmp_path: Path) -> None:
    result = fit(lambda: save_asynchronously("abcde"), tmp_path)
    assert [content(checkpoint) for checkpoint, _ in result.best_checkpoints] == list("abcde")


def test_a_process_ends_though_its_function_failed_with_a_checkpoint_in_flight(
    tmp_path: Path, drivers: Drivers
) -> None:
    def function() -> None:
        own = tmp_path / "own"
        own.mkdir()
        (own / "model").write_bytes(bytes(30_000_000))
        train.report({}, checkpoint=own, checkpoint_upload_mode=ASYNC)
        raise ValueError("boom")

    with drivers(lambda: fit(function, tmp_path)) as driver:
        _, err = driver.communicate(timeout=60)
    assert "WorkerGroupError: rank 0: ValueError: boom" in err


def test_a_committed_checkpoint_that_is_reported_again_is_not_given_away(tmp_path: Path) -> None:
    def function() -> None:
        save("a")
        first = train.get_checkpoint()
        train.report({}, checkpoint=first, checkpoint_upload_mode=ASYNC)

    result = fit(function, tmp_path)
    assert [content(checkpoint) for checkpoint, _ in result.best_checkpoints] == ["a", "a"]


def test_only_the_best_and_the_newest_stay(tmp_path: Path) -> None:
    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="loss")

    def function() -> list[str]:
        for loss in (1, 3, 2):
            with train.checkpoint_dir() as path:
                train.report({"loss": loss}, checkpoint=path)
        return [Path(each.checkpoint).name for each in train.get_all_reported_checkpoints()]

    result = fit(function, tmp_path, checkpoint_config=config)
    assert result.return_value == ["checkpoint_000001", "checkpoint_000002"]


def test_a_checkpoint_may_have_a_name(tmp_path: Path) -> None:
    result = fit(lambda: save("a", checkpoint_dir_name="best"), tmp_path)
    assert result.checkpoint == Checkpoint(tmp_path / "run" / "best")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "a/b", "/none/a", ".hidden", "logs", "journal.jsonl", "trainer.pkl"],
)
def test_a_name_that_leaves_the_run_or_is_taken_is_told_at_the_users_line(
    tmp_path: Path, name: str
) -> None:
    with pytest.raises(WorkerGroupError) as raised:
        fit(lambda: save("a", checkpoint_dir_name=name), tmp_path)
    (failure,) = raised.value.failures
    assert failure.type_name == "ValueError"
    assert f"checkpoint_dir_name={name!r}" in failure.message
    assert f"{save.__code__.co_filename}:" in failure.location


def test_the_name_of_a_checkpoint_that_exists_fails_the_run(tmp_path: Path) -> None:
    def function() -> None:
        save("a", checkpoint_dir_name="best")
        save("b", checkpoint_dir_name="best")

    with pytest.raises(ControllerError, match=r"FileExistsError.*/best is a committed checkpoint"):
        fit(function, tmp_path)
    assert content(Checkpoint(tmp_path / "run" / "best")) == "a"


@pytest.mark.parametrize("wait", [False, True])
def test_a_storage_that_refuses_a_checkpoint_ends_the_run_and_not_the_process(
    tmp_path: Path, wait: bool
) -> None:
    mode = CheckpointUploadMode.SYNC if wait else ASYNC

    def function() -> None:
        (tmp_path / "run" / "taken").write_text("by a file")
        save("a", checkpoint_dir_name="taken", checkpoint_upload_mode=mode)

    with pytest.raises(ControllerError, match="the run failed in its storage: FileExistsError"):
        fit(function, tmp_path)


def test_a_block_that_fails_leaves_no_checkpoint(tmp_path: Path) -> None:
    def function() -> None:
        with suppress(ValueError), train.checkpoint_dir() as path:
            (path / "half").write_text("written")
            raise ValueError
        assert not path.exists()
        save("whole")

    assert content(fit(function, tmp_path).checkpoint) == "whole"


def test_a_block_that_fails_after_its_report_does_not_harm_the_checkpoint(tmp_path: Path) -> None:
    def function() -> None:
        with suppress(ValueError), train.checkpoint_dir() as path:
            (path / "model").write_text("a")
            train.report({}, checkpoint=path, checkpoint_upload_mode=ASYNC)
            raise ValueError

    assert content(fit(function, tmp_path).checkpoint) == "a"


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"metrics": 1}, "TypeError: report() takes a dict of metrics, found 1"),
        ({"metrics": {"a": object()}}, "TypeError: metric 'a' is a builtins.object"),
        ({"metrics": {"a": "\ud800"}}, "ValueError: metric 'a'"),
        ({"metrics": {}, "checkpoint": 5}, "TypeError: Checkpoint takes the path"),
        (
            {"metrics": {}, "checkpoint": "/none"},
            "FileNotFoundError: report() received Checkpoint(",
        ),
        (
            {"metrics": {}, "checkpoint": __file__},
            "FileNotFoundError: report() received Checkpoint(",
        ),
        (
            {"metrics": {}, "checkpoint": "/none", "checkpoint_upload_mode": "async"},
            "TypeError: checkpoint_upload_mode must be a CheckpointUploadMode, found 'async'",
        ),
    ],
)
def test_a_wrong_report_is_told_at_the_users_line(
    tmp_path: Path, arguments: dict[str, Any], error: str
) -> None:
    def function() -> None:
        train.report(**arguments)

    with pytest.raises(WorkerGroupError) as raised:
        fit(function, tmp_path)
    assert str(raised.value).startswith(f"rank 0: {error}")
    assert raised.value.failures[0].location == f"{__file__}:{line_of(function)} in function"
    assert Result.from_path(tmp_path / "run").metrics is None


def line_of(function: Any) -> int:
    """The first line of a function's body."""
    return int(function.__code__.co_firstlineno) + 1


def test_ranks_may_save_into_one_directory(tmp_path: Path) -> None:
    """As `torch.distributed.checkpoint` does."""

    def function() -> list[str]:
        rank = train.get_context().get_world_rank()
        with train.checkpoint_dir() as own:
            shared = collective.broadcast_from_rank_zero(own)
            (shared / f"shard_{rank}").write_text(str(rank))
            collective.barrier()
            train.report({}, checkpoint=shared)
        checkpoint = train.get_checkpoint()
        assert checkpoint is not None
        return sorted(name for name in os.listdir(checkpoint) if name[0] != ".")

    result = run_in_threads(function, run_config=RunConfig(name="run", storage_path=tmp_path))
    assert result.return_values == [["shard_0", "shard_1"]] * 2


def test_a_rank_that_waits_at_its_end_for_an_asynchronous_checkpoint(tmp_path: Path) -> None:
    def function() -> None:
        if train.get_context().get_world_rank() == 0:
            with train.checkpoint_dir() as path:
                (path / "a").write_text("x")
                mode = train.CheckpointUploadMode.ASYNC
                train.report({}, path, checkpoint_upload_mode=mode)
        else:
            train.collective.barrier()

    with pytest.raises(train.DivergenceError, match="rank 0 waits for report #0"):
        run_in_threads(function, run_config=RunConfig(name="run", storage_path=tmp_path))


def test_an_attempt_that_is_over_leaves_nothing_in_staging(tmp_path: Path) -> None:
    """Rank 0 has offered a checkpoint, and rank 1 fails before its report."""

    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("x")
            if train.get_context().get_world_rank() == 0:
                train.report({}, checkpoint=path)
        raise RuntimeError("on purpose")

    config = RunConfig(
        name="run", storage_path=tmp_path, failure_config=FailureConfig(max_failures=2)
    )
    with pytest.raises(WorkerGroupError, match="on purpose"):
        run_in_threads(function, run_config=config)
    assert not (tmp_path / "run" / ".staging").exists()
