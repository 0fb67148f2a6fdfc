"""Checkpoints that stay where the training function has put them, in the run or elsewhere."""

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
from drawbar.train.testing import check_run, run_in_threads

NO_UPLOAD = CheckpointUploadMode.NO_UPLOAD


@pytest.fixture(autouse=True)
def work_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=["local", "memory"])
def storage_path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path / "runs") if request.param == "local" else f"memory://{uuid.uuid4().hex}"


@pytest.fixture(params=["in the run", "in a folder", "in a store"])
def places(request: pytest.FixtureRequest, storage_path: str, tmp_path: Path) -> str:
    """The folder that checkpoints are put into."""
    return {
        "in the run": f"{storage_path}/run/steps",
        "in a folder": str(tmp_path / "mine"),
        "in a store": f"memory://{uuid.uuid4().hex}/mine",
    }[request.param]


def fit(function: Any, storage_path: str | Path) -> Result:
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(
            name="run",
            storage_path=storage_path,
            checkpoint_config=CheckpointConfig(num_to_keep=1),
        ),
    ).fit()


def put(place: str, text: str) -> Checkpoint:
    """Write a checkpoint where it is to stay."""
    checkpoint = Checkpoint(place)
    if checkpoint.is_local:
        Path(place).mkdir(parents=True)
        (Path(place) / "model").write_text(text)
    else:
        with checkpoint.filesystem.open_output_stream(f"{checkpoint.path}/model") as stream:
            stream.write(text.encode())
    return checkpoint


def content(checkpoint: Checkpoint | None) -> str:
    assert checkpoint is not None
    checkpoint.verify()
    with checkpoint.as_directory() as path:
        return (Path(path) / "model").read_text()


def is_there(place: str) -> bool:
    checkpoint = Checkpoint(place)
    info = checkpoint.filesystem.get_file_info([f"{checkpoint.path}/model"])[0]
    return bool(info.type.value)


def test_a_run_goes_on_from_a_checkpoint_that_lies_anywhere(storage_path: str, places: str) -> None:
    def save(step: int) -> None:
        place = f"{places}/step_{step}"
        if step % 2:

            def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
                return put(place, Path(checkpoint, "model").read_text())

            with train.checkpoint_dir() as path:
                (path / "model").write_text(str(step))
                train.report({"step": step}, checkpoint=path, checkpoint_upload_fn=upload)
        else:
            made = put(place, str(step))
            train.report({"step": step}, checkpoint=made, checkpoint_upload_mode=NO_UPLOAD)

    def function() -> None:
        newest = train.get_checkpoint()
        first = 0 if newest is None else int(content(newest)) + 1
        for step in (first, first + 1):
            save(step)
            assert train.get_checkpoint() == Checkpoint(f"{places}/step_{step}")

    first = fit(function, storage_path)
    assert first.checkpoint == Checkpoint(f"{places}/step_1")
    second = fit(function, storage_path)
    assert content(second.checkpoint) == "3"
    again = Result.from_path(second.uri)
    assert again.checkpoint == second.checkpoint == Checkpoint(f"{places}/step_3")
    assert [metrics for _, metrics in again.best_checkpoints] == [{"step": 3}]
    check_run(second.uri)
    # Retention has let go of the others; outside the run they stay.
    assert is_there(f"{places}/step_0") == is_there(f"{places}/step_2") == ("/run/" not in places)


def test_what_a_function_gives_back_as_it_was_is_copied(storage_path: str) -> None:
    def function() -> None:
        with tempfile.TemporaryDirectory() as path:
            (Path(path) / "model").write_text("m")
            train.report({}, checkpoint=path, checkpoint_upload_fn=lambda given, name: given)

    result = fit(function, storage_path)
    assert content(result.checkpoint) == "m"
    assert result.checkpoint == Checkpoint(f"{storage_path}/run/checkpoint_000000")


def test_ranks_that_put_one_checkpoint_in_two_places_are_told(tmp_path: Path) -> None:
    def function() -> None:
        rank = f"rank_{train.get_context().get_world_rank()}"
        place = tmp_path / rank
        with train.checkpoint_dir() as path:
            (path / rank).write_text("m")
            train.report({}, checkpoint=path, checkpoint_upload_fn=lambda *_: put(str(place), "m"))

    with pytest.raises(ControllerError, match=r"same path on all ranks.*/rank_0' \(rank 0\)"):
        run_in_threads(function, run_config=RunConfig(name="run", storage_path=tmp_path))


def test_what_is_committed_is_not_committed_again(storage_path: str, places: str) -> None:
    def function() -> None:
        made = put(f"{places}/best", "m")
        for _ in range(2):
            train.report({}, checkpoint=made, checkpoint_upload_mode=NO_UPLOAD)

    with pytest.raises(ControllerError, match="best is a committed checkpoint already"):
        fit(function, storage_path)
    assert content(Result.from_path(f"{storage_path}/run").checkpoint) == "m"


def test_no_checkpoint_stays_where_the_run_cleans_up(storage_path: str) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            train.report({}, checkpoint=path, checkpoint_upload_mode=NO_UPLOAD)

    with pytest.raises(WorkerGroupError, match="is no place where a checkpoint can stay"):
        fit(function, storage_path)


def test_a_list_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    def function() -> None:
        made = put(str(tmp_path / "mine"), "m")
        train.report({}, checkpoint=made, checkpoint_upload_mode=NO_UPLOAD)

    fit(function, tmp_path)
    (tmp_path / "run" / "places.json").write_text('["../out"]')
    with pytest.raises(DamagedRunError, match=r"run/places.json lists .* cannot be read: '../out'"):
        Result.from_path(tmp_path / "run")
