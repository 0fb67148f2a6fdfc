"""Tests of runs on remote storage: a real S3 server, and memory:// through fsspec."""

from __future__ import annotations

import gzip
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from pyarrow.fs import LocalFileSystem, S3FileSystem, SubTreeFileSystem

from drawbar import train
from drawbar.train import (
    Checkpoint,
    CheckpointConfig,
    CheckpointError,
    CheckpointUploadMode,
    ControllerError,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from drawbar.train.testing import run_in_threads


@pytest.fixture(autouse=True)
def work_directories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Keep the work directories of remote runs in the test's directory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(params=["s3", "memory"])
def storage(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return `storage_path` and `storage_filesystem` of an empty directory."""
    directory = uuid.uuid4().hex
    if request.param == "s3":
        filesystem = request.getfixturevalue("s3")
        return {"storage_path": f"bucket/{directory}", "storage_filesystem": filesystem}
    return {"storage_path": f"memory://{directory}"}


def save(content: str, **options: Any) -> None:
    with train.checkpoint_dir() as path:
        (path / "part").mkdir()
        (path / "model").write_text(content)
        (path / "part" / "a").write_text(content * 2)
        train.report({"step": int(content)}, checkpoint=path, **options)


def content(checkpoint: Checkpoint | None) -> str:
    assert checkpoint is not None
    with checkpoint.as_directory() as path:
        assert (Path(path) / "part" / "a").read_text() == (Path(path) / "model").read_text() * 2
        return (Path(path) / "model").read_text()


def three_steps(fail_at: int = -1) -> Callable[[], int]:
    def function() -> int:
        newest = train.get_checkpoint()
        first = int(content(newest)) + 1 if newest else 0
        for step in range(first, 3):
            if step == fail_at:
                raise RuntimeError("on purpose")
            save(str(step))
        return first

    return function


def fit(function: Any, storage: dict[str, Any], num_workers: int = 0, **config: Any) -> Result:
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name="run", **storage, **config),
        metadata={"a": 1},
    ).fit()


def get_result_arguments(storage: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of `Result.from_path` for the run."""
    path = f"{storage['storage_path']}/run"
    return {"path": path, "storage_filesystem": storage.get("storage_filesystem")}


def get_run_path(result: Result) -> str:
    """Return the path of the run on its filesystem."""
    assert result.checkpoint is not None
    return result.checkpoint.path.rpartition("/")[0]


def read_journal(result: Result) -> bytes:
    """Return the journal in the storage."""
    with result.filesystem.open_input_stream(f"{get_run_path(result)}/journal.jsonl") as stream:
        return bytes(stream.read())


def write_journal(result: Result, journal: bytes) -> None:
    """Replace the journal in the storage."""
    with result.filesystem.open_output_stream(f"{get_run_path(result)}/journal.jsonl") as stream:
        stream.write(journal)


def get_work_directory() -> Path:
    """Training function that returns the work directory of its run on this machine."""
    return Path(train.get_context().get_storage())


def test_remote_run_stores_checkpoints_metrics_and_logs(storage: dict[str, Any]) -> None:
    result = fit(three_steps(), storage)
    reread = Result.from_path(**get_result_arguments(storage))
    assert [content(checkpoint) for checkpoint, _ in result.best_checkpoints] == ["0", "1", "2"]
    assert reread.checkpoint == result.checkpoint
    assert reread.checkpoint is not None
    assert list(reread.metrics_dataframe["step"]) == [0, 1, 2]
    run_path = reread.checkpoint.path.rpartition("/")[0]
    assert result.filesystem.get_file_info([f"{run_path}/logs/rank_0.log"])[0].is_file


def test_remote_run_resumes_on_another_machine(
    storage: dict[str, Any], work_directories: Path
) -> None:
    with pytest.raises(WorkerGroupError, match="on purpose"):
        fit(three_steps(fail_at=2), storage)
    shutil.rmtree(work_directories)
    result = fit(three_steps(), storage)
    assert result.return_value == 2
    assert list(result.metrics_dataframe["step"]) == [0, 1, 2]


def test_remote_trainer_is_restored_on_another_machine(
    storage: dict[str, Any], work_directories: Path
) -> None:
    with pytest.raises(WorkerGroupError, match="on purpose"):
        fit(three_steps(fail_at=2), storage)
    shutil.rmtree(work_directories)
    trainer = DataParallelTrainer.restore(
        **get_result_arguments(storage), train_loop_per_worker=three_steps()
    )
    assert trainer.fit().return_value == 2


def test_local_journal_that_continues_the_remote_one_is_used(
    storage: dict[str, Any],
) -> None:
    def function() -> Path:
        three_steps()()
        return get_work_directory()

    result = fit(function, storage)
    newest = read_journal(result)
    work_directory: Path = result.return_value
    work_directory.mkdir(parents=True)
    (work_directory / "journal.jsonl").write_bytes(newest)  # as a killed driver leaves it
    write_journal(result, b"".join(newest.splitlines(keepends=True)[:3]))
    assert Result.from_path(**get_result_arguments(storage)).metrics == {"step": 2}


def test_resume_with_truncated_remote_journal_continues_it(storage: dict[str, Any]) -> None:
    result = fit(three_steps(), storage)
    write_journal(result, read_journal(result)[:-20])
    fit(lambda: None, storage)
    outcomes = [
        attempt.outcome
        for attempt in Result.from_path(**get_result_arguments(storage)).timeline.attempts
    ]
    assert outcomes[-1] == "finished"


def test_runs_with_same_path_on_two_filesystems_are_separate(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    first, second = (
        {
            "storage_path": "runs",
            "storage_filesystem": SubTreeFileSystem(str(path), LocalFileSystem()),
        }
        for path in (tmp_path / "first", tmp_path / "second")
    )

    def function() -> dict[str, Any] | None:
        train.report({"step": 1})
        return fit(lambda: train.report({"step": 2}), second).metrics

    assert fit(function, first).return_value == {"step": 2}
    assert Result.from_path(**get_result_arguments(first)).metrics == {"step": 1}


@pytest.mark.usefixtures("s3")
def test_work_directory_depends_on_endpoint_but_not_credentials(s3_port: int) -> None:
    storage_path = f"bucket/{uuid.uuid4().hex}"

    def run(host: str, key: str) -> Path:
        filesystem = S3FileSystem(
            access_key=key,
            secret_key=key,
            endpoint_override=f"{host}:{s3_port}",
            scheme="http",
            region="us-east-1",
        )
        storage = {"storage_path": storage_path, "storage_filesystem": filesystem}
        directory: Path = fit(get_work_directory, storage).return_value
        return directory

    assert run("127.0.0.1", "key") == run("127.0.0.1", "other") != run("localhost", "key")


def test_work_directory_with_empty_client_kwargs_is_the_default() -> None:
    storage_path = uuid.uuid4().hex

    def run(**settings: Any) -> Path:
        filesystem = fsspec.filesystem("memory", **settings)
        storage = {"storage_path": storage_path, "storage_filesystem": filesystem}
        directory: Path = fit(get_work_directory, storage).return_value
        return directory

    default = run()
    assert run(client_kwargs=None) == run(client_kwargs={}) == default
    assert run(client_kwargs={"endpoint_url": "http://here"}) != default


def test_retention_deletes_remote_checkpoints(storage: dict[str, Any]) -> None:
    result = fit(three_steps(), storage, checkpoint_config=CheckpointConfig(num_to_keep=1))
    assert [content(checkpoint) for checkpoint, _ in result.best_checkpoints] == ["2"]
    assert result.checkpoint is not None
    run_path = result.checkpoint.path.rpartition("/")[0]
    assert not result.filesystem.get_file_info([f"{run_path}/checkpoint_000000/model"])[0].is_file


def test_validation_metrics_are_stored_with_remote_checkpoint(
    storage: dict[str, Any], work_directories: Path
) -> None:
    def validate(checkpoint: Checkpoint) -> dict[str, int]:
        return {"square": int(content(checkpoint)) ** 2}

    config = CheckpointConfig(num_to_keep=1, checkpoint_score_attribute="square")
    DataParallelTrainer(
        lambda: save("3", validation=True),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", **storage, checkpoint_config=config),
        validation_config=train.ValidationConfig(validate),
    ).fit()
    shutil.rmtree(work_directories)
    reread = Result.from_path(**get_result_arguments(storage))
    assert reread.metrics == {"step": 3, "square": 9}
    assert [metrics for _, metrics in reread.best_checkpoints] == [reread.metrics]


def test_resume_deletes_uncommitted_files_and_keeps_user_files(storage: dict[str, Any]) -> None:
    result = fit(three_steps(), storage)
    assert result.checkpoint is not None
    run_path = result.checkpoint.path.rpartition("/")[0]
    paths = {"checkpoint_000007/model", "best/.drawbar-pending", "mine/notes"}
    for path in paths:
        result.filesystem.create_dir(f"{run_path}/{path}".rpartition("/")[0])
        with result.filesystem.open_output_stream(f"{run_path}/{path}") as stream:
            stream.write(b"x")
    fit(lambda: None, storage, resume="must")
    remaining = {
        path for path in paths if result.filesystem.get_file_info([f"{run_path}/{path}"])[0].is_file
    }
    assert remaining == {"mine/notes", "checkpoint_000007/model"}


def test_remote_commit_does_not_overwrite_user_directory(storage: dict[str, Any]) -> None:
    result = fit(three_steps(), storage)
    assert result.checkpoint is not None
    user_directory = f"{result.checkpoint.path.rpartition('/')[0]}/checkpoint_000003"
    result.filesystem.create_dir(user_directory)
    with result.filesystem.open_output_stream(f"{user_directory}/model") as stream:
        stream.write(b"x")
    with pytest.raises(ControllerError, match="checkpoint_000003 exists, but Drawbar did not"):
        fit(lambda: save("3"), storage, resume="must")
    with result.filesystem.open_input_stream(f"{user_directory}/model") as stream:
        assert stream.read() == b"x"


def test_remote_checkpoint_is_read_copied_and_verified(
    storage: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = fit(three_steps(), storage).checkpoint
    assert checkpoint is not None
    checkpoint.verify()
    assert checkpoint.get_metadata() == {"a": 1}
    checkpoint.update_metadata({"b": 2})
    same = Checkpoint(checkpoint.path, checkpoint.filesystem)
    assert same == checkpoint
    assert same.get_metadata() == {"a": 1, "b": 2}
    assert (Path(same.to_directory(tmp_path / "copy")) / "model").read_text() == "2"
    assert same.manifest is not None
    assert [file.path for file in same.manifest.files] == ["model", "part/a"]


def test_remote_checkpoint_stores_compressed_file_unchanged(storage: dict[str, Any]) -> None:
    """By default, PyArrow compresses a file with this ending."""
    data = gzip.compress(b"rows")

    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "rows.gz").write_bytes(data)
            train.report({}, checkpoint=path)

    checkpoint = fit(function, storage).checkpoint
    assert checkpoint is not None
    info = checkpoint.filesystem.get_file_info(f"{checkpoint.path}/rows.gz")
    assert info.size == len(data)
    with checkpoint.as_directory() as path:
        assert (Path(path) / "rows.gz").read_bytes() == data


def test_verify_finds_changed_remote_file(storage: dict[str, Any]) -> None:
    checkpoint = fit(three_steps(), storage).checkpoint
    assert checkpoint is not None
    assert not checkpoint.is_local
    with checkpoint.filesystem.open_output_stream(f"{checkpoint.path}/model") as stream:
        stream.write(b"3")
    with pytest.raises(CheckpointError, match="model was changed after the commit"):
        checkpoint.verify()


def test_cached_copy_is_deleted_after_last_reader(storage: dict[str, Any]) -> None:
    checkpoint = fit(three_steps(), storage).checkpoint
    assert checkpoint is not None
    with checkpoint.as_directory() as path:
        with checkpoint.as_directory() as same:
            assert path == same
        assert (Path(path) / "model").read_text() == "2"
    assert not Path(path).exists()


def test_remote_checkpoint_has_no_local_path() -> None:
    checkpoint = Checkpoint("memory://somewhere/there")
    assert repr(checkpoint).startswith("Checkpoint('memory://somewhere/there'")
    with pytest.raises(TypeError, match="as_directory"):
        Path(checkpoint)
    with pytest.raises(CheckpointError, match="Checkpoint memory://somewhere/there does not exist"):
        checkpoint.to_directory()


def test_async_remote_checkpoints_are_committed_when_fit_returns(storage: dict[str, Any]) -> None:
    def function() -> None:
        for step in range(4):
            save(str(step), checkpoint_upload_mode=CheckpointUploadMode.ASYNC)

    contents = [content(checkpoint) for checkpoint, _ in fit(function, storage).best_checkpoints]
    assert contents == ["0", "1", "2", "3"]


def test_work_directory_is_deleted_after_run(
    storage: dict[str, Any], work_directories: Path
) -> None:
    result = fit(three_steps(), storage)
    assert not list(work_directories.rglob("*/*"))
    assert [attempt.outcome for attempt in result.timeline.attempts] == ["finished"]


def test_work_directory_with_uncommitted_moved_files_is_kept(
    storage: dict[str, Any], work_directories: Path, tmp_path: Path
) -> None:
    def function() -> None:
        if train.get_context().get_world_rank() == 0:
            (tmp_path / "source").mkdir()
            (tmp_path / "source" / "model").write_text("m")
            mode = CheckpointUploadMode.ASYNC
            train.report({}, checkpoint=tmp_path / "source", checkpoint_upload_mode=mode)
        train.collective.barrier()
        raise ValueError("boom")  # rank 1 has not reported, so nothing was committed

    with pytest.raises(WorkerGroupError, match="boom"):
        run_in_threads(function, run_config=RunConfig(name="run", **storage))
    assert [path.read_text() for path in work_directories.rglob("model")] == ["m"]


@pytest.mark.usefixtures("ray_cluster")
def test_two_workers_write_one_remote_checkpoint(s3: S3FileSystem) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / f"rank_{train.get_context().get_world_rank()}").write_text("x" * 1000)
            (path / "both").write_text("b")
            train.report({}, checkpoint=path)

    storage_path = f"bucket/{uuid.uuid4().hex}"
    result = fit(function, {"storage_path": storage_path, "storage_filesystem": s3}, num_workers=2)
    assert result.checkpoint is not None
    result.checkpoint.verify()
    with result.checkpoint.as_directory() as path:
        names = sorted(file.name for file in Path(path).iterdir() if not file.name.startswith("."))
    assert names == ["both", "rank_0", "rank_1"]


def test_s3_uri_with_endpoint_in_query_is_supported(
    s3: S3FileSystem, s3_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    query = f"scheme=http&endpoint_override=127.0.0.1:{s3_port}&region=us-east-1"
    result = fit(three_steps(), {"storage_path": f"s3://bucket/{uuid.uuid4().hex}?{query}"})
    assert result.uri.endswith(f"/run?{query}")
    assert content(Result.from_path(result.uri).checkpoint) == "2"


def test_resume_from_checkpoint_on_another_storage(tmp_path: Path) -> None:
    first = fit(three_steps(), {"storage_path": f"memory://{uuid.uuid4().hex}"}).checkpoint
    result = DataParallelTrainer(
        lambda: content(train.get_checkpoint()),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="fork", storage_path=tmp_path),
        resume_from_checkpoint=first,
    ).fit()
    assert result.return_value == "2"


def test_file_uri_is_a_local_path(tmp_path: Path) -> None:
    result = fit(three_steps(), {"storage_path": f"file://{tmp_path}"})
    assert result.path == str(tmp_path / "run")
    assert result.filesystem.type_name == "local"


def test_unknown_uri_scheme_raises_value_error() -> None:
    with pytest.raises(ValueError, match="nowhere://, which neither pyarrow nor fsspec supports"):
        fit(three_steps(), {"storage_path": "nowhere://x"})


def test_storage_filesystem_of_wrong_type_raises_type_error() -> None:
    with pytest.raises(TypeError, match="filesystem must be a pyarrow"):
        fit(three_steps(), {"storage_path": "x", "storage_filesystem": fsspec})
