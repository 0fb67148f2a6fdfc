"""Reports and checkpoints with `num_workers=0`."""

from __future__ import annotations

import os
import threading
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
from tests.train.runs import fit
from tests.train.text_checkpoints import ASYNC, content, save, save_asynchronously

if TYPE_CHECKING:
    from tests.train.conftest import Drivers


def test_local_report_returns_metrics_and_checkpoints(tmp_path: Path) -> None:
    def function() -> list[Any]:
        assert train.get_checkpoint() is None
        for text in "ab":
            train.report({"step": 1})
            save(text)
            assert content(train.get_checkpoint()) == text
        return train.get_all_reported_checkpoints()

    result = fit(function, tmp_path, metadata={"by": "ann"})
    checkpoints = [(content(entry.checkpoint), entry.metrics) for entry in result.return_value]
    assert checkpoints == [("a", {"text": "a"}), ("b", {"text": "b"})]
    assert [Path(entry.checkpoint).name for entry in result.return_value] == [
        "checkpoint_000001",
        "checkpoint_000003",
    ]
    assert result.metrics == {"text": "b"}
    assert content(result.checkpoint) == "b"
    assert result.checkpoint is not None
    assert result.checkpoint.get_metadata() == {"by": "ann"}


def test_report_of_user_directory_copies_it(tmp_path: Path) -> None:
    own = tmp_path / "own"

    def function() -> None:
        own.mkdir()
        for text in "ab":
            (own / "model").write_text(text)
            train.report({}, checkpoint=own)

    result = fit(function, tmp_path)
    assert [content(checkpoint) for checkpoint, _ in result.best_checkpoints] == ["a", "b"]
    assert (own / "model").read_text() == "b"


def test_report_with_delete_moves_user_directory(tmp_path: Path) -> None:
    own = tmp_path / "own"

    def function() -> None:
        own.mkdir()
        (own / "model").write_text("a")
        train.report({}, checkpoint=own, delete_local_checkpoint_after_upload=True)

    assert content(fit(function, tmp_path).checkpoint) == "a"
    assert not own.exists()


@pytest.mark.parametrize("delete", [None, True, False])
def test_async_report_allows_rewriting_directory(tmp_path: Path, delete: bool | None) -> None:
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
    contents = [content(checkpoint).split()[0] for checkpoint, _ in result.best_checkpoints]
    assert contents == list("012345")


def test_async_checkpoints_are_committed_when_fit_returns(tmp_path: Path) -> None:
    result = fit(lambda: save_asynchronously("abcde"), tmp_path)
    assert [content(checkpoint) for checkpoint, _ in result.best_checkpoints] == list("abcde")


def test_async_checkpoint_committed_after_newer_one_is_not_kept(tmp_path: Path) -> None:
    own = tmp_path / "own"

    def function() -> str:
        is_newer_committed = threading.Event()

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            is_newer_committed.wait(60)
            return checkpoint

        own.mkdir()
        (own / "model").write_text("old")
        train.report({}, own, checkpoint_upload_mode=ASYNC, checkpoint_upload_fn=upload)
        save("new")
        is_newer_committed.set()
        train.get_all_reported_checkpoints()  # waits for both commits
        return content(train.get_checkpoint())

    keep_one = CheckpointConfig(num_to_keep=1)
    result = fit(function, tmp_path, checkpoint_config=keep_one)
    assert result.return_value == "new"
    assert [content(checkpoint) for checkpoint, _ in result.best_checkpoints] == ["new"]
    assert content(result.checkpoint) == "new"


def test_checkpoint_that_other_rank_stores_during_failure_is_committed(tmp_path: Path) -> None:
    threads: dict[int, threading.Thread] = {}
    own = tmp_path / "own"
    own.mkdir()
    (own / "model").write_text("text")

    def function() -> None:
        rank = train.get_context().get_world_rank()
        threads[rank] = threading.current_thread()
        collective.barrier()

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            if rank == 0:
                threads[1].join(60)  # the failure has been sent
            return checkpoint

        train.report({}, own, checkpoint_upload_mode=ASYNC, checkpoint_upload_fn=upload)
        if rank == 1:
            raise ValueError("rank 1")
        collective.barrier()

    with pytest.raises(WorkerGroupError, match=r"Latest committed checkpoint: .*000000"):
        fit(function, tmp_path, num_workers=2, in_threads=True)


def test_failure_with_async_checkpoint_in_flight_ends_process(
    tmp_path: Path, drivers: Drivers
) -> None:
    def function() -> None:
        own = tmp_path / "own"
        own.mkdir()
        (own / "model").write_bytes(bytes(30_000_000))
        train.report({}, checkpoint=own, checkpoint_upload_mode=ASYNC)
        raise ValueError("boom")

    with drivers(lambda: fit(function, tmp_path)) as driver:
        _, err = driver.communicate(timeout=300)
    assert "WorkerGroupError: rank 0: ValueError: boom" in err


def test_report_of_committed_checkpoint_keeps_original(tmp_path: Path) -> None:
    def function() -> None:
        save("a")
        first = train.get_checkpoint()
        train.report({}, checkpoint=first, checkpoint_upload_mode=ASYNC)

    result = fit(function, tmp_path)
    assert [content(checkpoint) for checkpoint, _ in result.best_checkpoints] == ["a", "a"]


def test_retention_keeps_best_and_latest_checkpoint(tmp_path: Path) -> None:
    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="loss")

    def function() -> list[str]:
        for loss in (1, 3, 2):
            with train.checkpoint_dir() as path:
                train.report({"loss": loss}, checkpoint=path)
        return [Path(entry.checkpoint).name for entry in train.get_all_reported_checkpoints()]

    result = fit(function, tmp_path, checkpoint_config=config)
    assert result.return_value == ["checkpoint_000001", "checkpoint_000002"]


def test_report_with_directory_name_uses_it(tmp_path: Path) -> None:
    result = fit(lambda: save("a", checkpoint_dir_name="best"), tmp_path)
    assert result.checkpoint == Checkpoint(tmp_path / "run" / "best")


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../a", "a/b", "/none/a", ".hidden", "logs", "journal.jsonl", "trainer.pkl"],
)
def test_report_with_invalid_directory_name_raises_at_user_line(tmp_path: Path, name: str) -> None:
    with pytest.raises(WorkerGroupError) as raised:
        fit(lambda: save("a", checkpoint_dir_name=name), tmp_path)
    (failure,) = raised.value.failures
    assert failure.type_name == "ValueError"
    assert f"checkpoint_dir_name={name!r}" in failure.message
    assert f"{save.__code__.co_filename}:" in failure.location


def test_report_with_existing_directory_name_fails_run(tmp_path: Path) -> None:
    def function() -> None:
        save("a", checkpoint_dir_name="best")
        save("b", checkpoint_dir_name="best")

    with pytest.raises(ControllerError, match=r"FileExistsError.*/best is already committed"):
        fit(function, tmp_path)
    assert content(Checkpoint(tmp_path / "run" / "best")) == "a"


@pytest.mark.parametrize("wait", [False, True])
def test_storage_error_in_commit_fails_run_only(tmp_path: Path, wait: bool) -> None:
    mode = CheckpointUploadMode.SYNC if wait else ASYNC

    def function() -> None:
        (tmp_path / "run" / "taken").write_text("by a file")
        save("a", checkpoint_dir_name="taken", checkpoint_upload_mode=mode)

    with pytest.raises(
        ControllerError, match="a checkpoint could not be committed: FileExistsError"
    ):
        fit(function, tmp_path)


def test_checkpoint_dir_with_error_leaves_no_checkpoint(tmp_path: Path) -> None:
    def function() -> None:
        with suppress(ValueError), train.checkpoint_dir() as path:
            (path / "half").write_text("written")
            raise ValueError
        assert not path.exists()
        save("whole")

    assert content(fit(function, tmp_path).checkpoint) == "whole"


def test_checkpoint_dir_with_error_after_report_keeps_checkpoint(tmp_path: Path) -> None:
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
        ({"metrics": {}, "checkpoint": 5}, "TypeError: Checkpoint(path=5) must be the path"),
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
def test_report_with_invalid_arguments_raises_at_user_line(
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
    """Return the number of the first line of a function's body."""
    return int(function.__code__.co_firstlineno) + 1


def test_report_of_shared_directory_merges_ranks(tmp_path: Path) -> None:
    """As in `torch.distributed.checkpoint`."""

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


def test_async_checkpoint_without_other_rank_raises_divergence(tmp_path: Path) -> None:
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


def test_failed_attempt_leaves_empty_staging(tmp_path: Path) -> None:
    """Rank 0 has reported a checkpoint, and rank 1 fails before its report."""

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
