"""Tests of checkpoints that are committed in place, inside the run directory or outside."""

from __future__ import annotations

import tempfile
import uuid
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointUploadMode,
    ControllerError,
    DamagedRunError,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from drawbar.train.backend import register_data_position
from drawbar.train.testing import check_run, run_in_threads

NO_UPLOAD = CheckpointUploadMode.NO_UPLOAD


@pytest.fixture(autouse=True)
def work_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=["local", "memory"])
def storage_path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "runs") if request.param == "local" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture(params=["in the run", "in a directory", "in a store"])
def parent(request: pytest.FixtureRequest, storage_path: str, tmp_path: Path) -> str:
    """Return the directory in which checkpoints are written."""
    return {
        "in the run": f"{storage_path}/run/steps",
        "in a directory": str(tmp_path / "mine"),
        "in a store": f"memory://{uuid.uuid4().hex}/mine",
    }[request.param]


def fit(function: Any, storage_path: str | Path, num_to_keep: int | None = 1) -> Result:
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            name="run",
            storage_path=storage_path,
            checkpoint_config=CheckpointConfig(num_to_keep=num_to_keep),
        ),
    ).fit()


def write_checkpoint(path: str, text: str) -> Checkpoint:
    """Write a checkpoint that will be committed in place."""
    checkpoint = Checkpoint(path)
    if checkpoint.is_local:
        Path(path).mkdir(parents=True, exist_ok=True)
        (Path(path) / "model").write_text(text)
    else:
        with checkpoint.filesystem.open_output_stream(f"{checkpoint.path}/model") as stream:
            stream.write(text.encode())
    return checkpoint


def content(checkpoint: Checkpoint | None) -> str:
    assert checkpoint is not None
    checkpoint.verify()
    with checkpoint.as_directory() as path:
        return (Path(path) / "model").read_text()


def exists(path: str) -> bool:
    checkpoint = Checkpoint(path)
    info = checkpoint.filesystem.get_file_info([f"{checkpoint.path}/model"])[0]
    return bool(info.type.value)


def test_resume_from_checkpoint_committed_in_place(storage_path: str, parent: str) -> None:
    def save(step: int) -> None:
        path = f"{parent}/step_{step}"
        if step % 2:

            def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
                return write_checkpoint(path, Path(checkpoint, "model").read_text())

            with train.checkpoint_dir() as directory:
                (directory / "model").write_text(str(step))
                train.report({"step": step}, checkpoint=directory, checkpoint_upload_fn=upload)
        else:
            checkpoint = write_checkpoint(path, str(step))
            train.report({"step": step}, checkpoint=checkpoint, checkpoint_upload_mode=NO_UPLOAD)

    def function() -> None:
        newest = train.get_checkpoint()
        first = 0 if newest is None else int(content(newest)) + 1
        for step in (first, first + 1):
            save(step)
            assert train.get_checkpoint() == Checkpoint(f"{parent}/step_{step}")

    first_result = fit(function, storage_path)
    assert first_result.checkpoint == Checkpoint(f"{parent}/step_1")
    second_result = fit(function, storage_path)
    assert content(second_result.checkpoint) == "3"
    reread = Result.from_path(second_result.uri)
    assert reread.checkpoint == second_result.checkpoint == Checkpoint(f"{parent}/step_3")
    assert [metrics for _, metrics in reread.best_checkpoints] == [{"step": 3}]
    check_run(second_result.uri)
    # Retention has deleted the other checkpoints in the run, but not the external ones.
    assert exists(f"{parent}/step_0") == exists(f"{parent}/step_2") == ("/run/" not in parent)


def test_upload_fn_that_returns_its_argument_copies_checkpoint(storage_path: str) -> None:
    def function() -> None:
        with tempfile.TemporaryDirectory() as path:
            (Path(path) / "model").write_text("m")
            train.report(
                {}, checkpoint=path, checkpoint_upload_fn=lambda checkpoint, name: checkpoint
            )

    result = fit(function, storage_path)
    assert content(result.checkpoint) == "m"
    assert result.checkpoint == Checkpoint(f"{storage_path}/run/checkpoint_000000")


def test_upload_fns_with_different_paths_raise(tmp_path: Path) -> None:
    def function() -> None:
        rank = f"rank_{train.get_context().get_world_rank()}"
        checkpoint_path = tmp_path / rank
        with train.checkpoint_dir() as path:
            (path / rank).write_text("m")
            train.report(
                {},
                checkpoint=path,
                checkpoint_upload_fn=lambda *_: write_checkpoint(str(checkpoint_path), "m"),
            )

    with pytest.raises(ControllerError, match=r"same path on all ranks.*/rank_0' \(rank 0\)"):
        run_in_threads(function, run_config=RunConfig(name="run", storage_path=tmp_path))


def test_no_upload_of_committed_checkpoint_raises(storage_path: str, parent: str) -> None:
    def function() -> None:
        checkpoint = write_checkpoint(f"{parent}/best", "m")
        for _ in range(2):
            train.report({}, checkpoint=checkpoint, checkpoint_upload_mode=NO_UPLOAD)

    with pytest.raises(ControllerError, match="best is already committed"):
        fit(function, storage_path)
    assert content(Result.from_path(f"{storage_path}/run").checkpoint) == "m"


def test_no_upload_from_staging_directory_raises(storage_path: str) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            train.report({}, checkpoint=path, checkpoint_upload_mode=NO_UPLOAD)

    with pytest.raises(WorkerGroupError, match="cannot be committed in place"):
        fit(function, storage_path)


@pytest.mark.parametrize("is_in_place", [False, True])
def test_rollback_allows_new_checkpoint_of_the_same_name(
    storage_path: str, parent: str, is_in_place: bool
) -> None:
    def save(text: str) -> None:
        if is_in_place:
            path = f"{parent}/step_{len(text)}"
            checkpoint = write_checkpoint(path, text)
            train.report({}, checkpoint=checkpoint, checkpoint_upload_mode=NO_UPLOAD)
        else:
            with train.checkpoint_dir() as directory:
                (directory / "model").write_text(text)
                train.report({}, checkpoint=directory)

    def function() -> str:
        newest = train.get_checkpoint()
        text = "" if newest is None else content(newest)
        num_read = register_data_position(
            "batches", lambda: num_read, skip_batches=lambda num_batches: num_read + num_batches
        )
        for batch in range(num_read or 0, 6):
            num_read = batch + 1
            if batch == 2:
                train.rollback("nan", skip=1, to=2)
            text += str(batch)
            save(text)
        return text

    result = fit(function, storage_path, num_to_keep=None)
    assert result.return_value == "045"
    reread = Result.from_path(result.uri)
    found = [content(checkpoint) for checkpoint, _ in reread.best_checkpoints]
    assert sorted(found) == ["0", "04", "045"]
    check_run(result.uri)


def test_damaged_index_of_external_checkpoints_raises(tmp_path: Path) -> None:
    def function() -> None:
        checkpoint = write_checkpoint(str(tmp_path / "mine"), "m")
        train.report({}, checkpoint=checkpoint, checkpoint_upload_mode=NO_UPLOAD)

    fit(function, tmp_path)
    (tmp_path / "run" / "places.json").write_text('["../out"]')
    with pytest.raises(DamagedRunError, match=r"run/places.json cannot be read: '../out'"):
        Result.from_path(tmp_path / "run")
