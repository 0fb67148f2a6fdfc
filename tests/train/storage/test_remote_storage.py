"""Runs whose storage is not mounted: a real S3 server, and memory:// through fsspec."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Iterator
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
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from drawbar.train._storage import upkeep
from drawbar.train._storage.run_directory import open_run_directory
from drawbar.train.testing import run_in_threads


@pytest.fixture(autouse=True)
def work_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Have the work folders of remote runs lie below the test's own folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def s3_port() -> Iterator[int]:
    """Run an S3 server on a free port of this machine."""
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    yield server.get_host_and_port()[1]
    server.stop()


@pytest.fixture
def s3(s3_port: int) -> S3FileSystem:
    """Give a filesystem with a bucket `bucket`."""
    filesystem = S3FileSystem(
        access_key="key",
        secret_key="secret",
        endpoint_override=f"127.0.0.1:{s3_port}",
        scheme="http",
        region="us-east-1",
        allow_bucket_creation=True,
    )
    filesystem.create_dir("bucket")
    return filesystem


@pytest.fixture(params=["s3", "memory"])
def storage(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Give `storage_path` and `storage_filesystem` of an empty folder."""
    folder = uuid.uuid4().hex
    if request.param == "s3":
        filesystem = request.getfixturevalue("s3")
        return {"storage_path": f"bucket/{folder}", "storage_filesystem": filesystem}
    return {"storage_path": f"memory://{folder}"}


def save(content: str, **how: Any) -> None:
    with train.checkpoint_dir() as path:
        (path / "part").mkdir()
        (path / "model").write_text(content)
        (path / "part" / "a").write_text(content * 2)
        train.report({"step": int(content)}, checkpoint=path, **how)


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


def where(storage: dict[str, Any]) -> dict[str, Any]:
    """Give the arguments by which `Result.from_path` finds the run."""
    path = f"{storage['storage_path']}/run"
    return {"path": path, "storage_filesystem": storage.get("storage_filesystem")}


def journal_of(storage: dict[str, Any]) -> bytes:
    """Read the journal in the storage."""
    journal = open_run_directory(*where(storage).values()).run_files.read_journal()
    assert journal is not None
    return journal


def test_a_run_leaves_its_checkpoints_metrics_and_logs(storage: dict[str, Any]) -> None:
    result = fit(three_steps(), storage)
    again = Result.from_path(**where(storage))
    assert [content(each) for each, _ in result.best_checkpoints] == ["0", "1", "2"]
    assert again.checkpoint == result.checkpoint
    assert again.checkpoint is not None
    assert list(again.metrics_dataframe["step"]) == [0, 1, 2]
    folder = again.checkpoint.path.rpartition("/")[0]
    assert result.filesystem.get_file_info([f"{folder}/logs/rank_0.log"])[0].is_file


def test_another_machine_resumes(storage: dict[str, Any], work_folders: Path) -> None:
    with pytest.raises(WorkerGroupError, match="on purpose"):
        fit(three_steps(fail_at=2), storage)
    shutil.rmtree(work_folders)
    result = fit(three_steps(), storage)
    assert result.return_value == 2
    assert list(result.metrics_dataframe["step"]) == [0, 1, 2]


def test_a_trainer_is_restored_on_another_machine(
    storage: dict[str, Any], work_folders: Path
) -> None:
    with pytest.raises(WorkerGroupError, match="on purpose"):
        fit(three_steps(fail_at=2), storage)
    shutil.rmtree(work_folders)
    trainer = DataParallelTrainer.restore(**where(storage), train_loop_per_worker=three_steps())
    assert trainer.fit().return_value == 2


def test_a_journal_that_only_this_machine_has_is_kept(
    storage: dict[str, Any],
) -> None:
    result = fit(three_steps(), storage)
    newest = journal_of(storage)
    directory = open_run_directory(*where(storage).values())
    upkeep.create_directories(directory)
    directory.journal_path.write_bytes(newest)  # as a driver leaves it that was killed
    assert result.checkpoint is not None
    folder = result.checkpoint.path.rpartition("/")[0]
    with result.filesystem.open_output_stream(f"{folder}/journal.jsonl") as stream:
        stream.write(b"".join(newest.splitlines(keepends=True)[:3]))
    assert Result.from_path(**where(storage)).metrics == {"step": 2}


def test_a_journal_that_was_cut_in_the_storage_is_gone_on_with(storage: dict[str, Any]) -> None:
    result = fit(three_steps(), storage)
    assert result.checkpoint is not None
    folder = result.checkpoint.path.rpartition("/")[0]
    cut = journal_of(storage)[:-20]
    with result.filesystem.open_output_stream(f"{folder}/journal.jsonl") as stream:
        stream.write(cut)
    fit(lambda: None, storage)
    outcomes = [each.outcome for each in Result.from_path(**where(storage)).timeline.attempts]
    assert outcomes[-1] == "finished"


def test_runs_of_one_path_on_two_filesystems_have_nothing_in_common(tmp_path: Path) -> None:
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
    one, other = (
        {
            "storage_path": "runs",
            "storage_filesystem": SubTreeFileSystem(str(path), LocalFileSystem()),
        }
        for path in (tmp_path / "one", tmp_path / "other")
    )

    def function() -> dict[str, Any] | None:
        train.report({"step": 1})
        return fit(lambda: train.report({"step": 2}), other).metrics

    assert fit(function, one).return_value == {"step": 2}
    assert Result.from_path(**where(one)).metrics == {"step": 1}


def test_a_server_is_known_by_its_address_with_any_credentials(work_folders: Path) -> None:
    def work_folder(port: int, key: str) -> Path:
        filesystem = S3FileSystem(
            access_key=key, secret_key=key, endpoint_override=f"127.0.0.1:{port}", region="r"
        )
        return open_run_directory("bucket/run", filesystem).local_path

    assert work_folder(1, "key") == work_folder(1, "other") != work_folder(2, "key")
    assert not work_folders.exists()


def test_a_library_may_be_given_no_address(work_folders: Path) -> None:
    def work_folder(**settings: Any) -> Path:
        return open_run_directory("bucket/run", fsspec.filesystem("memory", **settings)).local_path

    assert work_folder(client_kwargs=None) == work_folder(client_kwargs={}) == work_folder()
    assert work_folder(client_kwargs={"endpoint_url": "http://here"}) != work_folder()


def test_retention_deletes(storage: dict[str, Any]) -> None:
    result = fit(three_steps(), storage, checkpoint_config=CheckpointConfig(num_to_keep=1))
    assert [content(each) for each, _ in result.best_checkpoints] == ["2"]
    assert result.checkpoint is not None
    folder = result.checkpoint.path.rpartition("/")[0]
    assert not result.filesystem.get_file_info([f"{folder}/checkpoint_000000/model"])[0].is_file


def test_a_validation_is_kept_with_its_checkpoint(
    storage: dict[str, Any], work_folders: Path
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
    shutil.rmtree(work_folders)
    again = Result.from_path(**where(storage))
    assert again.metrics == {"step": 3, "square": 9}
    assert [metrics for _, metrics in again.best_checkpoints] == [again.metrics]


def test_leftovers_are_swept_and_what_is_the_users_stays(storage: dict[str, Any]) -> None:
    result = fit(three_steps(), storage)
    assert result.checkpoint is not None
    folder = result.checkpoint.path.rpartition("/")[0]
    put = {"checkpoint_000007/model", "best/.drawbar-pending", "mine/notes"}
    for path in put:
        result.filesystem.create_dir(f"{folder}/{path}".rpartition("/")[0])
        with result.filesystem.open_output_stream(f"{folder}/{path}") as stream:
            stream.write(b"x")
    fit(lambda: None, storage, resume="must")
    left = {
        path for path in put if result.filesystem.get_file_info([f"{folder}/{path}"])[0].is_file
    }
    assert left == {"mine/notes", "checkpoint_000007/model"}


def test_a_folder_of_the_users_is_not_written_into(storage: dict[str, Any]) -> None:
    result = fit(three_steps(), storage)
    assert result.checkpoint is not None
    users = f"{result.checkpoint.path.rpartition('/')[0]}/checkpoint_000003"
    result.filesystem.create_dir(users)
    with result.filesystem.open_output_stream(f"{users}/model") as stream:
        stream.write(b"x")
    with pytest.raises(WorkerGroupError, match="checkpoint_000003 exists, but Drawbar did not"):
        fit(lambda: save("3"), storage, resume="must")
    with result.filesystem.open_input_stream(f"{users}/model") as stream:
        assert stream.read() == b"x"


def test_a_checkpoint_is_read_copied_verified_and_annotated(
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


def test_a_changed_file_is_found(storage: dict[str, Any]) -> None:
    checkpoint = fit(three_steps(), storage).checkpoint
    assert checkpoint is not None
    assert not checkpoint.is_local
    with checkpoint.filesystem.open_output_stream(f"{checkpoint.path}/model") as stream:
        stream.write(b"3")
    with pytest.raises(CheckpointError, match="model was changed after the commit"):
        checkpoint.verify()


def test_a_copy_lives_as_long_as_its_last_reader(storage: dict[str, Any]) -> None:
    checkpoint = fit(three_steps(), storage).checkpoint
    assert checkpoint is not None
    with checkpoint.as_directory() as path:
        with checkpoint.as_directory() as same:
            assert path == same
        assert (Path(path) / "model").read_text() == "2"
    assert not Path(path).exists()


def test_a_remote_checkpoint_has_no_local_path() -> None:
    checkpoint = Checkpoint("memory://somewhere/there")
    assert repr(checkpoint).startswith("Checkpoint('memory://somewhere/there'")
    with pytest.raises(TypeError, match="as_directory"):
        Path(checkpoint)
    with pytest.raises(CheckpointError, match="Checkpoint memory://somewhere/there does not exist"):
        checkpoint.to_directory()


def test_asynchronous_checkpoints_are_committed_when_fit_returns(storage: dict[str, Any]) -> None:
    def function() -> None:
        for step in range(4):
            save(str(step), checkpoint_upload_mode=CheckpointUploadMode.ASYNC)

    found = [content(each) for each, _ in fit(function, storage).best_checkpoints]
    assert found == ["0", "1", "2", "3"]


def test_no_work_folder_is_left(storage: dict[str, Any], work_folders: Path) -> None:
    result = fit(three_steps(), storage)
    assert not list(work_folders.rglob("*/*"))
    assert [attempt.outcome for attempt in result.timeline.attempts] == ["finished"]


def test_a_work_folder_stays_that_has_what_nobody_else_has(
    storage: dict[str, Any], work_folders: Path, tmp_path: Path
) -> None:
    def function() -> None:
        if train.get_context().get_world_rank() == 0:
            (tmp_path / "own").mkdir()
            (tmp_path / "own" / "model").write_text("m")
            mode = CheckpointUploadMode.ASYNC
            train.report({}, checkpoint=tmp_path / "own", checkpoint_upload_mode=mode)
        train.collective.barrier()
        raise ValueError("boom")  # rank 1 has not reported, so nothing was committed

    with pytest.raises(WorkerGroupError, match="boom"):
        run_in_threads(function, run_config=RunConfig(name="run", **storage))
    assert [path.read_text() for path in work_folders.rglob("model")] == ["m"]


@pytest.mark.usefixtures("ray_cluster")
def test_two_workers_write_one_checkpoint(s3: S3FileSystem) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / f"rank_{train.get_context().get_world_rank()}").write_text("x" * 1000)
            (path / "both").write_text("b")
            train.report({}, checkpoint=path)

    folder = f"bucket/{uuid.uuid4().hex}"
    result = fit(function, {"storage_path": folder, "storage_filesystem": s3}, num_workers=2)
    assert result.checkpoint is not None
    result.checkpoint.verify()
    with result.checkpoint.as_directory() as path:
        names = sorted(each.name for each in Path(path).iterdir() if not each.name.startswith("."))
    assert names == ["both", "rank_0", "rank_1"]


def test_a_uri_may_carry_the_address_of_the_server(
    s3: S3FileSystem, s3_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    query = f"scheme=http&endpoint_override=127.0.0.1:{s3_port}&region=us-east-1"
    result = fit(three_steps(), {"storage_path": f"s3://bucket/{uuid.uuid4().hex}?{query}"})
    assert result.uri.endswith(f"/run?{query}")
    assert content(Result.from_path(result.uri).checkpoint) == "2"


def test_a_run_starts_from_a_checkpoint_on_another_storage(tmp_path: Path) -> None:
    first = fit(three_steps(), {"storage_path": f"memory://{uuid.uuid4().hex}"}).checkpoint
    result = DataParallelTrainer(
        lambda: content(train.get_checkpoint()),
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="fork", storage_path=tmp_path),
        resume_from_checkpoint=first,
    ).fit()
    assert result.return_value == "2"


def test_a_file_uri_is_a_local_path(tmp_path: Path) -> None:
    result = fit(three_steps(), {"storage_path": f"file://{tmp_path}"})
    assert result.path == str(tmp_path / "run")
    assert result.filesystem.type_name == "local"


def test_an_unknown_scheme_is_told() -> None:
    with pytest.raises(ValueError, match="nowhere://, which neither pyarrow nor fsspec supports"):
        fit(three_steps(), {"storage_path": "nowhere://x"})


def test_what_is_no_filesystem_is_told() -> None:
    with pytest.raises(TypeError, match="filesystem must be a pyarrow"):
        fit(three_steps(), {"storage_path": "x", "storage_filesystem": fsspec})
