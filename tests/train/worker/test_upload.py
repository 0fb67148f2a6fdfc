"""Checkpoint uploads of `report()`: modes, upload functions, and invalid arguments."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.train import (
    Checkpoint,
    CheckpointUploadMode,
    Result,
    RunConfig,
    WorkerGroupError,
)
from drawbar.train.testing import run_in_threads
from tests.train.runs import fit

NO_UPLOAD = CheckpointUploadMode.NO_UPLOAD


@pytest.fixture(autouse=True)
def work_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(params=["local", "memory"])
def storage_path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"


def put(checkpoint: Checkpoint, name: str, text: str) -> None:
    """Write a file into the directory of an existing or future checkpoint."""
    if checkpoint.is_local:
        Path(checkpoint).mkdir(exist_ok=True)
        (Path(checkpoint) / name).write_text(text)
        return
    with checkpoint.filesystem.open_output_stream(f"{checkpoint.path}/{name}") as stream:
        stream.write(text.encode())


def content(checkpoint: Checkpoint | None) -> dict[str, str]:
    assert checkpoint is not None
    checkpoint.verify()
    with checkpoint.as_directory() as path:
        files = [file for file in Path(path).iterdir() if not file.name.startswith(".")]
        return {file.name: file.read_text() for file in files}


def test_upload_mode_no_upload_commits_directory_in_place(storage_path: str) -> None:
    uri = f"{storage_path}/run/mine"

    def function() -> None:
        put(Checkpoint(uri), "model", "m")
        train.report({"a": 1}, checkpoint=Checkpoint(uri), checkpoint_upload_mode=NO_UPLOAD)

    result = fit(function, storage_path)
    assert result.checkpoint == Checkpoint(uri)
    assert content(result.checkpoint) == {"model": "m"}
    assert [metrics for _, metrics in Result.from_path(result.uri).best_checkpoints] == [{"a": 1}]


def test_upload_mode_no_upload_with_delete_local_checkpoint_raises(storage_path: str) -> None:
    def function() -> None:
        train.report(
            {},
            checkpoint=Checkpoint(f"{storage_path}/run/mine"),
            checkpoint_upload_mode=NO_UPLOAD,
            delete_local_checkpoint_after_upload=True,
        )

    with pytest.raises(WorkerGroupError, match="would delete the checkpoint"):
        fit(function, storage_path)


def test_upload_mode_no_upload_of_empty_directory_raises() -> None:
    storage_path = f"memory://{uuid.uuid4().hex}"

    def function() -> None:
        empty = Checkpoint(f"{storage_path}/run/mine")
        train.report({}, checkpoint=empty, checkpoint_upload_mode=NO_UPLOAD)

    with pytest.raises(WorkerGroupError, match=r"memory://.* contains no files"):
        fit(function, storage_path)


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC])
def test_upload_fn_replaces_upload(storage_path: str, mode: CheckpointUploadMode) -> None:
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
def test_upload_fn_can_write_to_reported_directory_in_the_run(
    storage_path: str, mode: CheckpointUploadMode
) -> None:
    def upload_to_name(checkpoint: Checkpoint, name: str) -> Checkpoint:
        storage = train.get_context().get_storage()
        assert name == storage.extract_checkpoint_dir_name_from_path(checkpoint.path)
        put(checkpoint, "model", name)
        return checkpoint

    def function() -> None:
        storage = train.get_context().get_storage()
        for step in range(2):
            path = storage.build_checkpoint_path_from_name(f"step_{step}")
            checkpoint = Checkpoint(path, filesystem=storage.storage_filesystem)
            train.report(
                {},
                checkpoint=checkpoint,
                checkpoint_upload_mode=mode,
                checkpoint_upload_fn=upload_to_name,
            )

    result = fit(function, storage_path)
    again = Result.from_path(result.path, result.filesystem)
    assert again.checkpoint == result.checkpoint
    assert content(result.checkpoint) == {"model": "step_1"}
    assert len(result.best_checkpoints) == 2


def test_upload_fn_of_all_ranks_can_write_to_one_directory(tmp_path: Path) -> None:
    def function() -> None:
        storage, rank = train.get_context().get_storage(), train.get_context().get_world_rank()
        shared = Checkpoint(storage.build_checkpoint_path_from_name("mine"))

        def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
            put(checkpoint, f"part_{rank}", str(rank))
            return checkpoint

        train.report({}, checkpoint=shared, checkpoint_upload_fn=upload)

    config = RunConfig(name="run", storage_path=tmp_path)
    result = run_in_threads(function, num_workers=3, run_config=config)
    assert content(result.checkpoint) == {"part_0": "0", "part_1": "1", "part_2": "2"}


def test_upload_fn_on_every_rank_stores_file_of_lowest_rank(
    storage_path: str, tmp_path: Path
) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        train.collective.barrier()
        return checkpoint

    def function() -> None:
        rank = train.get_context().get_world_rank()
        directory = tmp_path / f"rank_{rank}"
        directory.mkdir()
        (directory / "model").write_text(str(rank))
        train.report({}, checkpoint=directory, checkpoint_upload_fn=upload)

    config = RunConfig(name="run", storage_path=storage_path)
    assert content(run_in_threads(function, run_config=config).checkpoint) == {"model": "0"}


def test_upload_fn_can_use_persist_current_checkpoint(storage_path: str) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        return train.get_context().get_storage().persist_current_checkpoint(checkpoint, name)

    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            train.report({}, checkpoint=path, checkpoint_upload_fn=upload)

    assert content(fit(function, storage_path).checkpoint) == {"model": "m"}


def test_report_of_checkpoint_in_other_storage_copies_it(storage_path: str) -> None:
    other = Checkpoint(f"memory://{uuid.uuid4().hex}")

    def function() -> None:
        put(other, "model", "m")
        train.report({}, checkpoint=other)

    result = fit(function, storage_path)
    assert content(result.checkpoint) == {"model": "m"}
    assert result.checkpoint != other


def test_storage_context_is_a_path_and_builds_checkpoint_paths(storage_path: str) -> None:
    def function() -> None:
        storage = train.get_context().get_storage()
        (storage / "notes").write_text("mine")
        assert Path(storage).is_dir()
        assert storage.exists()
        assert storage.experiment_dir_name == "run"
        assert storage.experiment_fs_path == f"{storage.storage_fs_path}/run"
        info = storage.storage_filesystem.get_file_info(storage.storage_fs_path)
        assert info.base_name == Path(storage.storage_fs_path).name
        nested = storage.build_checkpoint_path_from_name("steps/1")
        assert storage.extract_checkpoint_dir_name_from_path(nested) == "steps/1"
        with pytest.raises(ValueError, match="'/x/y' is not in"):
            storage.extract_checkpoint_dir_name_from_path("/x/y")

    fit(function, storage_path)


def test_upload_fn_returning_missing_directory_raises(storage_path: str, tmp_path: Path) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            train.report(
                {}, checkpoint=path, checkpoint_upload_fn=lambda *_: Checkpoint(tmp_path / "x")
            )

    with pytest.raises(WorkerGroupError, match=r"/x'\), which is not a directory on this"):
        fit(function, storage_path)


def test_upload_fn_returning_none_raises(storage_path: str) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            train.report({}, checkpoint=path, checkpoint_upload_fn=lambda *_: None)  # type: ignore[arg-type]

    with pytest.raises(WorkerGroupError, match="must return a Checkpoint, found None"):
        fit(function, storage_path)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda checkpoint: checkpoint, r"<lambda>\(checkpoint\) does not: too many positional"),
        ("s3://bucket", "must be a function, found 's3://bucket'"),
    ],
)
def test_upload_fn_with_wrong_signature_raises(tmp_path: Path, function: Any, message: str) -> None:
    def save() -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("m")
            train.report({}, checkpoint=path, checkpoint_upload_fn=function)

    with pytest.raises(WorkerGroupError, match=f"checkpoint_upload_fn .*{message}") as raised:
        fit(save, tmp_path)
    assert "drawbar/train" not in raised.value.failures[0].traceback


@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, CheckpointUploadMode.ASYNC])
def test_upload_fn_error_traceback_contains_only_user_frames(
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


def test_report_on_every_rank_uploads_all_files(tmp_path: Path) -> None:
    storage_path = f"memory://{uuid.uuid4().hex}"

    def function() -> None:
        rank = train.get_context().get_world_rank()
        directory = tmp_path / f"rank_{rank}"
        directory.mkdir()
        (directory / f"part_{rank}").write_text(str(rank))
        train.report({}, checkpoint=directory)

    config = RunConfig(name="run", storage_path=storage_path)
    result = run_in_threads(function, num_workers=3, run_config=config)
    assert content(result.checkpoint) == {"part_0": "0", "part_1": "1", "part_2": "2"}
    assert (tmp_path / "rank_0").exists()


def test_report_with_existing_checkpoint_name_raises(storage_path: str) -> None:
    def function() -> None:
        for text in "ab":
            with train.checkpoint_dir() as path:
                (path / "model").write_text(text)
                train.report({}, checkpoint=path, checkpoint_dir_name="best")

    with pytest.raises(train.ControllerError, match="best is already committed"):
        fit(function, storage_path)
    run = f"{storage_path}/run"
    assert content(Result.from_path(run).checkpoint) == {"model": "a"}


def test_report_with_delete_local_checkpoint_moves_directory(
    storage_path: str, tmp_path: Path
) -> None:
    directory = tmp_path / "directory"

    def function() -> None:
        directory.mkdir()
        (directory / "model").write_text("m")
        train.report({}, checkpoint=directory, delete_local_checkpoint_after_upload=True)

    assert content(fit(function, storage_path).checkpoint) == {"model": "m"}
    assert not directory.exists()
