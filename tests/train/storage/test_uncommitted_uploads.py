"""Tests that files of a `checkpoint_upload_fn` whose attempt failed are not committed later."""

from __future__ import annotations

import os
import signal
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from drawbar import train
from drawbar.train import Checkpoint, Result, WorkerGroupError, collective
from tests.train.runs import fit

if TYPE_CHECKING:
    from tests.train.conftest import Drivers


@pytest.fixture(params=["local", "memory"])
def storage_path(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return str(tmp_path) if request.param == "local" else f"memory://{uuid.uuid4().hex}"


def write(directory: Checkpoint, name: str) -> Checkpoint:
    """Write a file into the directory of a checkpoint, which may exist."""
    if directory.is_local:
        Path(directory).mkdir(parents=True, exist_ok=True)
        (Path(directory) / name).write_text("x")
    else:
        with directory.filesystem.open_output_stream(f"{directory.path}/{name}") as stream:
            stream.write(b"x")
    return directory


def list_files(checkpoint: Checkpoint | None) -> list[str]:
    assert checkpoint is not None
    checkpoint.verify()
    with checkpoint.as_directory() as path:
        return sorted(file.name for file in Path(path).iterdir() if file.name[0] != ".")


def report(**options: Any) -> None:
    rank = train.get_context().get_world_rank()
    with train.checkpoint_dir() as path:
        (path / f"rank_{rank}").write_text("x")
        train.report({}, checkpoint=path, **options)


@pytest.mark.parametrize("uploads_again", [True, False])
def test_upload_of_failed_attempt_is_not_part_of_next_checkpoint(
    storage_path: str, uploads_again: bool
) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        rank, attempt = (
            train.get_context().get_world_rank(),
            train.get_context().get_attempt(),
        )
        uploaded = Checkpoint(f"{storage_path}/run/{name}")
        if attempt == 1 or rank == 0:
            write(uploaded, f"attempt_{attempt}.rank_{rank}")
        collective.barrier()
        if attempt == 0 and rank == 1:
            raise RuntimeError("rank 1 fails when rank 0 has written its files")
        return uploaded

    def function() -> None:
        is_uploaded = uploads_again or train.get_context().get_attempt() == 0
        report(**({"checkpoint_upload_fn": upload} if is_uploaded else {}))

    result = fit(function, storage_path, num_workers=2, in_threads=True, max_failures=1)
    uploaded, copied = ["attempt_1.rank_0", "attempt_1.rank_1"], ["rank_0", "rank_1"]
    assert list_files(result.checkpoint) == (uploaded if uploads_again else copied)
    assert len(result.timeline.attempts) == 2


def test_upload_of_killed_driver_is_deleted_by_next_start(tmp_path: Path, drivers: Drivers) -> None:
    leftover = tmp_path / "run" / "checkpoint_000000"

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        write(Checkpoint(leftover), "stale")
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("killed")

    def main() -> None:
        fit(lambda: report(checkpoint_upload_fn=upload), tmp_path)

    with drivers(main) as driver:
        assert driver.wait() == -signal.SIGKILL, driver.communicate()
    assert os.listdir(leftover) == ["stale"]
    result = fit(report, tmp_path)
    assert result.checkpoint == Checkpoint(leftover)
    assert list_files(result.checkpoint) == ["rank_0"]
    assert not (tmp_path / "run" / ".uploads").exists()


def test_upload_to_directory_of_user_keeps_it_after_failure(storage_path: str) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        raise RuntimeError("upload failed")

    def function() -> None:
        write(Checkpoint(f"{storage_path}/run/mine"), "notes")
        report(checkpoint_upload_fn=upload, checkpoint_dir_name="mine")

    for _ in range(2):
        with pytest.raises(WorkerGroupError, match="upload failed"):
            fit(function, storage_path, max_failures=1)
    with Checkpoint(f"{storage_path}/run/mine").as_directory() as path:
        assert os.listdir(path) == ["notes"]


def test_upload_to_subdirectory_is_kept_by_next_start(storage_path: str) -> None:
    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        return write(Checkpoint(f"{storage_path}/run/{name}/model"), "weights")

    def function() -> None:
        if train.get_checkpoint() is None:
            report(checkpoint_upload_fn=upload)
            raise RuntimeError("failed after the commit")

    with pytest.raises(WorkerGroupError, match="failed after the commit"):
        fit(function, storage_path)
    fit(function, storage_path)
    assert list_files(Result.from_path(f"{storage_path}/run").checkpoint) == ["weights"]
