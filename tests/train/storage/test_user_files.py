"""Tests that files of the user are not changed: moved files, other runs, reserved names."""

from __future__ import annotations

import os
import re
import shutil
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
    Result,
    RunConfig,
    WorkerGroupError,
    collective,
)
from drawbar.train.testing import run_in_threads
from tests.train.runs import fit
from tests.train.storage.user_directories import content, write
from tests.train.text_checkpoints import ASYNC, save

SYNC, NO_UPLOAD = CheckpointUploadMode.SYNC, CheckpointUploadMode.NO_UPLOAD
MOVED: dict[str, Any] = {"delete_local_checkpoint_after_upload": True}


@pytest.mark.parametrize(
    "path", ["", "run", "run/logs", "run/.staging", "run/.workers", "link", "link/logs", "run/.."]
)
@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_report_of_directory_with_run_files_raises(
    tmp_path: Path, path: str, mode: CheckpointUploadMode
) -> None:
    storage = tmp_path / "storage"

    def function() -> None:
        save("a")
        (storage / "link").symlink_to("run")
        delete = mode is ASYNC
        train.report(
            {},
            checkpoint=f"{storage}/{path}",
            checkpoint_upload_mode=mode,
            delete_local_checkpoint_after_upload=delete,
        )

    with pytest.raises(WorkerGroupError, match="contains files of the run"):
        fit(function, storage)
    checkpoint = Result.from_path(storage / "run").checkpoint
    assert checkpoint is not None
    checkpoint.verify()


def test_report_accepts_directory_with_reused_inode_of_internal_directory(tmp_path: Path) -> None:
    mine = tmp_path / "mine"

    def function() -> None:
        internal = tmp_path / "run" / "stacks"
        internal.mkdir()
        # The first report of a user's directory looks up the internal directories.
        train.report({}, checkpoint=write(tmp_path / "first", model="a"))
        internal.rename(mine)  # keeps the inode on any filesystem
        write(mine, model="b")
        train.report({}, checkpoint=mine)

    result = fit(function, tmp_path)
    assert content(result.checkpoint) == {"model": "b"}


def test_no_upload_of_log_directory_raises(tmp_path: Path) -> None:
    def function() -> None:
        path = tmp_path / "run" / "logs"
        train.report({}, checkpoint=path, checkpoint_upload_mode=NO_UPLOAD)

    with pytest.raises(WorkerGroupError, match="contains files of the run"):
        fit(function, tmp_path)


@pytest.mark.parametrize("path", ["run", "", "run/checkpoint_000000", "run/mine"])
def test_report_of_other_runs_directory_copies_and_keeps_it(tmp_path: Path, path: str) -> None:
    other = tmp_path / "other"
    fit(lambda: save("a"), other)
    write(other / "run" / "mine", notes="n")
    before = content(other)

    def function() -> None:
        train.report({}, checkpoint=other / path, checkpoint_upload_mode=ASYNC, **MOVED)

    result = fit(function, tmp_path)
    assert content(result.checkpoint).items() >= content(other / path).items()
    assert content(other) == before
    Checkpoint(other / "run" / "checkpoint_000000").verify()


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_moved_files_without_commit_are_preserved(
    tmp_path: Path, mode: CheckpointUploadMode, caplog: pytest.LogCaptureFixture
) -> None:
    source, preserved = (
        tmp_path / "source",
        tmp_path / "run" / ".uncommitted" / "rank_0.checkpoint_000001",
    )

    def function() -> None:
        save("a")
        if train.get_context().get_world_rank() == 1:
            collective.barrier()
            raise RuntimeError("on purpose")
        write(source, model="m")
        if mode is SYNC:
            collective.barrier()
        train.report({}, checkpoint=source, checkpoint_upload_mode=mode, **MOVED)
        collective.barrier()

    with pytest.raises(WorkerGroupError, match="on purpose"):
        run_in_threads(function, run_config=RunConfig(name="run", storage_path=tmp_path))
    assert content(source if mode is SYNC else preserved) == {"model": "m"}
    assert (str(preserved) in caplog.text) is (mode is ASYNC)
    fit(lambda: save("b"), tmp_path)
    assert not preserved.exists()


def test_commit_does_not_replace_user_directory(tmp_path: Path) -> None:
    user_directory = tmp_path / "run" / "checkpoint_000001"

    def function() -> None:
        if train.get_checkpoint() is None:
            save("a")
            write(user_directory, notes="n")
        save("b")

    for _ in range(2):
        with pytest.raises(ControllerError, match=f"{user_directory} exists, but Drawbar did not"):
            fit(function, tmp_path)
    assert content(user_directory) == {"notes": "n"}
    user_directory.rename(tmp_path / "away")
    assert content(fit(function, tmp_path).checkpoint) == {"model": "b"}


@pytest.mark.parametrize(
    "name", [".drawbar.json", ".drawbar-checksums.json", ".drawbar-pending", ".drawbar-x.7.tmp"]
)
def test_report_of_reserved_file_name_raises(tmp_path: Path, name: str) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / name).write_text("mine")
            train.report({}, checkpoint=path)

    message = (
        rf"A checkpoint cannot contain \S*/{re.escape(name)}, because Drawbar reserves this name"
    )
    with pytest.raises(
        WorkerGroupError, match=rf"(?s)^rank 0: ValueError: .*ValueError: {message}"
    ):
        fit(function, tmp_path)


def test_report_accepts_unusual_file_names(tmp_path: Path) -> None:
    names = [
        ".drawbarrc",
        ".drawbar",
        ".drawbar-notes",
        "a\nb",
        " a ",
        "a\\b",
        "\u00e9",
        "e\u0301",
        "d" * 255,
        "deep/" * 200 + "x",
        "sub/.drawbar.json",
        ".drawbar-x/a.1.tmp",
    ]

    def function() -> None:
        with train.checkpoint_dir() as path:
            for name in names:
                (path / name).parent.mkdir(parents=True, exist_ok=True)
                (path / name).write_text(name)
            train.report({}, checkpoint=path)

    checkpoint = fit(function, tmp_path).checkpoint
    assert checkpoint is not None
    checkpoint.verify()
    files = content(checkpoint)
    assert {name: files[name] for name in names} == {name: name for name in names}


def test_report_of_non_utf8_file_name_raises_with_path(tmp_path: Path) -> None:
    def function() -> None:
        source = write(tmp_path / "source")
        Path(os.fsdecode(os.fsencode(source) + b"/bad\xff")).write_text("x")
        train.report({}, checkpoint=source)

    message = r"/source/bad\\xff', because its name is not UTF-8"
    with pytest.raises(WorkerGroupError, match=message):
        fit(function, tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "\udcff", "n" * 256, "\u00e9" * 128])
def test_invalid_checkpoint_dir_name_raises(tmp_path: Path, name: str) -> None:
    with pytest.raises(WorkerGroupError, match="ValueError: checkpoint_dir_name="):
        fit(lambda: save("a", checkpoint_dir_name=name), tmp_path)


def test_user_copy_of_checkpoint_is_ignored_and_kept(tmp_path: Path) -> None:
    fit(lambda: save("a"), tmp_path)
    run = tmp_path / "run"
    shutil.copytree(run / "checkpoint_000000", run / "best")
    keep_one = CheckpointConfig(num_to_keep=1)
    assert Result.from_path(run).checkpoint == Checkpoint(run / "checkpoint_000000")
    for text in "bc":
        fit(lambda text=text: save(text), tmp_path, checkpoint_config=keep_one)
    assert content(run / "best") == {"model": "a"}
    assert {path.name for path in run.glob("checkpoint_*")} == {"checkpoint_000002"}


def test_checkpoint_with_long_name_has_checksums(tmp_path: Path) -> None:
    fit(lambda: save("a", checkpoint_dir_name="x" * 255), tmp_path)
    assert (tmp_path / "run" / ("x" * 255) / ".drawbar-checksums.json").exists()


def test_report_of_moved_checkpoint_dir_raises(tmp_path: Path) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            train.report({}, checkpoint=path)
            train.report({}, checkpoint=path)

    message = r"If checkpoint_dir\(\) created it, report it only once, because report\(\) moves it"
    with pytest.raises(WorkerGroupError, match=message):
        fit(function, tmp_path)


@pytest.mark.parametrize("subdirectory", ["", "below"])
@pytest.mark.parametrize("is_home", [True, False])
def test_report_of_home_or_working_directory_copies_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, subdirectory: str, is_home: bool
) -> None:
    source = tmp_path / "source"
    (source / subdirectory).mkdir(parents=True)
    (source / "model").write_text("m")
    if is_home:
        monkeypatch.setenv("HOME", str(source / subdirectory))
    else:
        monkeypatch.chdir(source / subdirectory)

    def function() -> None:
        train.report({}, checkpoint=source, checkpoint_upload_mode=ASYNC)

    assert content(fit(function, tmp_path / "runs").checkpoint) == {"model": "m"}
    assert (source / "model").read_text() == "m"


@pytest.mark.parametrize("kind", ["local", "links", "object store"])
def test_ranks_can_move_one_shared_directory(tmp_path: Path, kind: str) -> None:
    source, far = tmp_path / "source", write(tmp_path / "far", x="x")

    def function() -> None:
        rank = train.get_context().get_world_rank()
        for text in "ab":
            if rank == 0:
                write(source / "deep", model=text)
                if kind == "links":
                    (source / "directory").symlink_to(far)
            for turn in range(3):
                collective.barrier()
                if turn == 2 - rank:
                    train.report({}, checkpoint=source, checkpoint_upload_mode=ASYNC)

    storage_path = f"memory://{uuid.uuid4().hex}" if kind == "object store" else str(tmp_path)
    config = RunConfig(name="run", storage_path=storage_path)
    result = run_in_threads(function, num_workers=3, run_config=config)
    linked = {"directory/x": "x"} if kind == "links" else {}
    for (checkpoint, _), text in zip(result.best_checkpoints, "ab", strict=True):
        checkpoint.verify()
        with checkpoint.as_directory() as path:
            assert content(path) == {"deep/model": text, **linked}
    assert not source.exists()
    assert content(far) == {"x": "x"}


def test_shared_directory_refilled_during_deletion_keeps_new_files(tmp_path: Path) -> None:
    source = tmp_path / "source"

    def function() -> None:
        for turn in range(8):
            if train.get_context().get_world_rank() == 0:
                for number in range(100):
                    write(source / f"{number}" / "deep", model=f"{turn}")
            collective.barrier()
            train.report({}, checkpoint=source, **MOVED)

    config = RunConfig(name="run", storage_path=str(tmp_path))
    result = run_in_threads(function, num_workers=4, run_config=config)
    for turn, (checkpoint, _) in enumerate(result.best_checkpoints):
        assert list(content(checkpoint).values()) == [f"{turn}"] * 100
    assert not source.exists()


def test_moved_directory_gets_permissions_of_run(tmp_path: Path) -> None:
    def function() -> None:
        source = tempfile.mkdtemp(dir=tmp_path)
        write(Path(source), model="m")
        train.report({}, checkpoint=source, checkpoint_upload_mode=ASYNC)

    checkpoint = fit(function, tmp_path).checkpoint
    assert checkpoint is not None
    assert Path(checkpoint.path).stat().st_mode == (tmp_path / "run" / "logs").stat().st_mode


def test_files_added_while_directory_is_uploaded_are_kept(tmp_path: Path) -> None:
    source = tmp_path / "source"

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        path = shutil.copytree(checkpoint.path, train.get_context().get_storage() / name)
        write(source / "deep", late="l")
        return Checkpoint(path)

    def function() -> None:
        write(source, model="m")
        write(source / "deep", part="p")
        train.report({}, checkpoint=source, checkpoint_upload_fn=upload, **MOVED)

    assert content(fit(function, tmp_path).checkpoint) == {"model": "m", "deep/part": "p"}
    assert content(source) == {"deep/late": "l"}
