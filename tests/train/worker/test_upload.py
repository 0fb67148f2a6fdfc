"""How `report()` gets a checkpoint into the storage: modes, own upload functions, mistakes."""

from __future__ import annotations

import logging
import queue
import uuid
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.train import (
    Checkpoint,
    CheckpointUploadMode,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from drawbar.train._storage import retries
from drawbar.train.testing import run_in_threads

NO_UPLOAD = CheckpointUploadMode.NO_UPLOAD


@pytest.fixture(autouse=True)
def work_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=["local", "memory"])
def storage_path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"


def fit(function: Any, storage_path: str | Path) -> Result:
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=storage_path),
    ).fit()


def put(place: Checkpoint, name: str, text: str) -> None:
    """Write a file where a checkpoint lies or will lie."""
    if place.is_local:
        Path(place).mkdir(exist_ok=True)
        (Path(place) / name).write_text(text)
        return
    with place.filesystem.open_output_stream(f"{place.path}/{name}") as stream:
        stream.write(text.encode())


def content(checkpoint: Checkpoint | None) -> dict[str, str]:
    assert checkpoint is not None
    checkpoint.verify()
    with checkpoint.as_directory() as path:
        files = [each for each in Path(path).iterdir() if not each.name.startswith(".")]
        return {each.name: each.read_text() for each in files}


def test_what_lies_in_the_storage_is_committed_where_it_is(storage_path: str) -> None:
    place = f"{storage_path}/run/mine"

    def function() -> None:
        put(Checkpoint(place), "model", "m")
        train.report({"a": 1}, checkpoint=Checkpoint(place), checkpoint_upload_mode=NO_UPLOAD)

    result = fit(function, storage_path)
    assert result.checkpoint == Checkpoint(place)
    assert content(result.checkpoint) == {"model": "m"}
    assert [metrics for _, metrics in Result.from_path(result.uri).best_checkpoints] == [{"a": 1}]


def test_what_is_committed_in_place_cannot_be_given_away(storage_path: str) -> None:
    def function() -> None:
        train.report(
            {},
            checkpoint=Checkpoint(f"{storage_path}/run/mine"),
            checkpoint_upload_mode=NO_UPLOAD,
            delete_local_checkpoint_after_upload=True,
        )

    with pytest.raises(WorkerGroupError, match="would delete the checkpoint"):
        fit(function, storage_path)


def test_an_empty_place_is_no_checkpoint() -> None:
    storage_path = f"memory://{uuid.uuid4().hex}"

    def function() -> None:
        place = Checkpoint(f"{storage_path}/run/mine")
        train.report({}, checkpoint=place, checkpoint_upload_mode=NO_UPLOAD)

    with pytest.raises(WorkerGroupError, match="there are no files in memory://"):
        fit(function, storage_path)


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC])
def test_a_function_of_the_users_uploads(storage_path: str, mode: CheckpointUploadMode) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        target = Checkpoint(f"{storage_path}/run/{name}")
        put(target, "packed", (Path(checkpoint) / "model").read_text() * 2)
        return target

    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            train.report(
                {}, checkpoint=path, checkpoint_upload_fn=upload, checkpoint_upload_mode=mode
            )

    assert content(fit(function, storage_path).checkpoint) == {"packed": "mm"}


@pytest.mark.parametrize("mode", list(CheckpointUploadMode)[:2])
def test_a_function_may_fill_a_place_of_its_own_in_the_run(
    storage_path: str, mode: CheckpointUploadMode
) -> None:
    def wait(checkpoint: Checkpoint, name: str) -> Checkpoint:
        storage = train.get_context().get_storage()
        assert name == storage.extract_checkpoint_dir_name_from_path(checkpoint.path)
        put(checkpoint, "model", name)
        return checkpoint

    def function() -> None:
        storage = train.get_context().get_storage()
        for step in range(2):
            path = storage.build_checkpoint_path_from_name(f"step_{step}")
            mine = Checkpoint(path, filesystem=storage.storage_filesystem)
            train.report(
                {}, checkpoint=mine, checkpoint_upload_mode=mode, checkpoint_upload_fn=wait
            )

    result = fit(function, storage_path)
    again = Result.from_path(result.path, result.filesystem)
    assert again.checkpoint == result.checkpoint
    assert content(result.checkpoint) == {"model": "step_1"}
    assert len(result.best_checkpoints) == 2


def test_every_rank_fills_its_part_of_such_a_place(tmp_path: Path) -> None:
    def function() -> None:
        storage, rank = train.get_context().get_storage(), train.get_context().get_world_rank()
        place = Checkpoint(storage.build_checkpoint_path_from_name("mine"))

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            put(checkpoint, f"part_{rank}", str(rank))
            return checkpoint

        train.report({}, checkpoint=place, checkpoint_upload_fn=upload)

    config = RunConfig(name="run", storage_path=tmp_path)
    result = run_in_threads(function, num_workers=3, run_config=config)
    assert content(result.checkpoint) == {"part_0": "0", "part_1": "1", "part_2": "2"}


def test_a_function_is_called_on_every_rank_and_the_lowest_gives_a_file(
    storage_path: str, tmp_path: Path
) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        train.collective.barrier()
        return checkpoint

    def function() -> None:
        rank = train.get_context().get_world_rank()
        own = tmp_path / f"rank_{rank}"
        own.mkdir()
        (own / "model").write_text(str(rank))
        train.report({}, checkpoint=own, checkpoint_upload_fn=upload)

    config = RunConfig(name="run", storage_path=storage_path)
    assert content(run_in_threads(function, run_config=config).checkpoint) == {"model": "0"}


def test_a_function_may_leave_the_upload_to_the_run(storage_path: str) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        return train.get_context().get_storage().persist_current_checkpoint(checkpoint, name)

    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            train.report({}, checkpoint=path, checkpoint_upload_fn=upload)

    assert content(fit(function, storage_path).checkpoint) == {"model": "m"}


def test_a_checkpoint_may_lie_in_another_storage(storage_path: str) -> None:
    other = Checkpoint(f"memory://{uuid.uuid4().hex}")

    def function() -> None:
        put(other, "model", "m")
        train.report({}, checkpoint=other)

    result = fit(function, storage_path)
    assert content(result.checkpoint) == {"model": "m"}
    assert result.checkpoint != other


def test_the_storage_is_a_path_and_a_place_on_a_filesystem(storage_path: str) -> None:
    def function() -> None:
        storage = train.get_context().get_storage()
        (storage / "notes").write_text("mine")
        assert Path(storage).is_dir()
        assert storage.exists()
        assert storage.experiment_dir_name == "run"
        assert storage.experiment_fs_path == f"{storage.storage_fs_path}/run"
        found = storage.storage_filesystem.get_file_info(storage.storage_fs_path)
        assert found.base_name == Path(storage.storage_fs_path).name
        nested = storage.build_checkpoint_path_from_name("steps/1")
        assert storage.extract_checkpoint_dir_name_from_path(nested) == "steps/1"
        with pytest.raises(ValueError, match="'/x/y' is not in"):
            storage.extract_checkpoint_dir_name_from_path("/x/y")

    fit(function, storage_path)


def test_a_place_that_a_function_has_left_empty_is_refused(
    storage_path: str, tmp_path: Path
) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            train.report(
                {}, checkpoint=path, checkpoint_upload_fn=lambda *_: Checkpoint(tmp_path / "x")
            )

    with pytest.raises(WorkerGroupError, match=r"/x'\), which is not a directory on this"):
        fit(function, storage_path)


def test_a_function_that_gives_no_checkpoint_is_refused(storage_path: str) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            train.report({}, checkpoint=path, checkpoint_upload_fn=lambda *_: None)  # type: ignore[arg-type]

    with pytest.raises(WorkerGroupError, match="must return a Checkpoint, found None"):
        fit(function, storage_path)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda checkpoint: checkpoint, r"<lambda>\(checkpoint\) cannot be: too many positional"),
        ("s3://bucket", "must be a function, found 's3://bucket'"),
    ],
)
def test_what_cannot_be_called_with_checkpoint_and_name_is_refused_at_once(
    tmp_path: Path, function: Any, message: str
) -> None:
    def save() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            train.report({}, checkpoint=path, checkpoint_upload_fn=function)

    with pytest.raises(WorkerGroupError, match=f"checkpoint_upload_fn .*{message}") as raised:
        fit(save, tmp_path)
    assert "drawbar/train" not in raised.value.failures[0].traceback


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC])
def test_what_a_function_raises_is_told_with_the_users_lines_alone(
    tmp_path: Path, mode: CheckpointUploadMode
) -> None:
    def upload(*_: object) -> Checkpoint:
        raise ArithmeticError("no")

    def save() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            train.report(
                {}, checkpoint=path, checkpoint_upload_mode=mode, checkpoint_upload_fn=upload
            )

    with pytest.raises(WorkerGroupError, match="ArithmeticError: no") as raised:
        fit(save, tmp_path)
    lines = [line for line in raised.value.failures[0].traceback.splitlines() if 'File "' in line]
    assert lines
    assert all(__file__ in line for line in lines)


def test_a_function_that_takes_long_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "SLOW_WARNING_PERIOD_S", 0.01)

    def save() -> str:
        told = queue.SimpleQueue[str]()
        texts = list[str]()

        def note(record: logging.LogRecord) -> bool:
            told.put(record.getMessage())
            return True

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            texts.append(told.get(timeout=60))
            return checkpoint

        logger = logging.getLogger("drawbar.train")
        logger.addFilter(note)
        try:
            with train.checkpoint_dir() as path:
                (path / "model").write_text("m")
                train.report({}, checkpoint=path, checkpoint_upload_fn=upload)
        finally:
            logger.removeFilter(note)
        return texts[0]

    result = fit(save, tmp_path)
    told = "checkpoint_upload_fn for checkpoint checkpoint_000000 of rank_0 is slow"
    assert result.return_value.startswith(told)
    assert content(result.checkpoint) == {"model": "m"}


def test_every_rank_uploads_what_is_its_own(tmp_path: Path) -> None:
    storage_path = f"memory://{uuid.uuid4().hex}"

    def function() -> None:
        rank = train.get_context().get_world_rank()
        own = tmp_path / f"rank_{rank}"
        own.mkdir()
        (own / f"part_{rank}").write_text(str(rank))
        train.report({}, checkpoint=own)

    config = RunConfig(name="run", storage_path=storage_path)
    result = run_in_threads(function, num_workers=3, run_config=config)
    assert content(result.checkpoint) == {"part_0": "0", "part_1": "1", "part_2": "2"}
    assert (tmp_path / "rank_0").exists()


def test_a_name_is_given_once(storage_path: str) -> None:
    def function() -> None:
        for text in "ab":
            with train.checkpoint_dir() as path:
                (path / "model").write_text(text)
                train.report({}, checkpoint=path, checkpoint_dir_name="best")

    with pytest.raises(train.ControllerError, match="best is already committed"):
        fit(function, storage_path)
    run = f"{storage_path}/run"
    assert content(Result.from_path(run).checkpoint) == {"model": "a"}


def test_what_is_handed_over_is_gone_from_here(storage_path: str, tmp_path: Path) -> None:
    own = tmp_path / "own"

    def function() -> None:
        own.mkdir()
        (own / "model").write_text("m")
        train.report({}, checkpoint=own, delete_local_checkpoint_after_upload=True)

    assert content(fit(function, storage_path).checkpoint) == {"model": "m"}
    assert not own.exists()
