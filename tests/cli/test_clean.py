"""Tests of `drawbar clean`."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
import signal
import socket
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from drawbar import train
from drawbar.train import (
    DataParallelTrainer,
    FailureConfig,
    ResumeError,
    RunConfig,
    RunInProgressError,
    ScalingConfig,
    WorkerGroupError,
)
from drawbar.train.runs import find_run
from drawbar.train.testing import check_run
from tests.cli.conftest import Command, make_run


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Separate directory for temporary files and the cache of this machine."""
    machine = tmp_path / "machine"
    machine.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(machine))
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine / "cache"))
    return machine


def list_unused(cli: Command, *arguments: object) -> list[str]:
    data = json.loads(cli("clean", *arguments, "--json").out)
    return [Path(file["path"]).name for file in data["files"]]


def test_clean_without_unused_files_changes_nothing(cli: Command, storage: Path) -> None:
    before = sorted(storage.rglob("*"))
    assert cli("clean", storage, "--yes").out == "Nothing to delete.\n"
    assert sorted(storage.rglob("*")) == before


@pytest.mark.usefixtures("ray_cluster")
def test_ended_run_leaves_no_staging_and_no_exit_reports(cli: Command, tmp_path: Path) -> None:
    def train_func(config: dict[str, Any]) -> None:
        with train.checkpoint_dir() as path:
            (path / "model").write_text("weights")
            train.report({}, checkpoint=path)
        if train.get_context().get_world_rank() == 1 and train.get_context().get_attempt() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if config["fails"]:
            raise ValueError("boom")

    for fails in (False, True):
        trainer = DataParallelTrainer(
            train_func,
            train_loop_config={"fails": fails},
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(
                name=f"run_{fails}",
                storage_path=tmp_path,
                failure_config=FailureConfig(max_failures=1),
            ),
        )
        with pytest.raises(WorkerGroupError, match="boom") if fails else nullcontext():
            trainer.fit()
        hidden = [path.name for path in (tmp_path / f"run_{fails}").glob(".*")]
        assert hidden == []
    assert list_unused(cli, tmp_path) == []


def test_clean_deletes_uncommitted_files_only_with_yes(cli: Command, storage: Path) -> None:
    stage = storage / "long" / ".staging" / "stage-1"
    stage.mkdir(parents=True)
    (stage / "model").write_text("half")
    result = cli("clean", storage)
    assert result.out.splitlines()[0].split("  ") == [
        "4 bytes",
        "uncommitted files",
        str(stage.parent),
    ]
    assert "4 bytes can be deleted. Run again with --yes." in result.out
    assert stage.exists()
    assert cli("clean", storage, "--yes").code == 0
    assert not stage.exists()
    assert list_unused(cli, storage) == []


def test_clean_in_narrow_terminal_prints_complete_rows(
    cli: Command, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = storage / "long" / ".staging" / "stage-1"
    stage.mkdir(parents=True)
    (stage / "model").write_text("half")
    monkeypatch.setenv("COLUMNS", "40")
    first = cli("clean", storage).out.splitlines()[0]
    assert first.split("  ") == ["4 bytes", "uncommitted files", str(stage.parent)]


def test_clean_keep_ranks_checkpoints_by_run_config(cli: Command, storage: Path) -> None:
    old = ["checkpoint_000000", "checkpoint_000001"]
    assert list_unused(cli, storage / "long", "--keep", 1) == old
    assert cli("clean", storage / "long", "--keep", 1, "--yes").code == 0
    run = find_run(storage / "long")
    assert [manifest.name for manifest in run.list_checkpoints()] == ["checkpoint_000002"]
    assert run.status == "finished"
    check_run(run.path)
    with pytest.raises(ResumeError, match="contains a finished run"):
        make_run(storage, "long", 3, resume="never")


def test_clean_deletes_unused_local_files_only(cli: Command, storage: Path, machine: Path) -> None:
    copies = machine / f"drawbar-{os.geteuid()}"
    copies.mkdir(mode=0o700)
    (copies / "0123").mkdir()
    (copies / "checkpoint_new").mkdir()
    os.utime(copies / "0123", (0, 0))
    cache = machine / "cache" / "drawbar"
    old = cache / "old-0123456789ab"
    fresh, opened, moved, other = (cache / f"{name}-0123456789ab" for name in "abcd")
    for directory, relative_path in (
        (old, "logs/rank_0.log"),
        (fresh, "logs/rank_0.log"),  # a rank is writing
        (opened, "logs/rank_0.log"),  # a rank has opened it and may write
        (moved, ".uncommitted/0.name/model"),  # files of an uncommitted checkpoint
        (other, "model"),
        (cache / "datasets", "images"),  # not a work directory
    ):
        file = directory / relative_path
        file.parent.mkdir(parents=True)
        file.touch()
        for path in (file, *file.parents[: len(Path(relative_path).parts)]):
            os.utime(path, None if path == fresh / relative_path else (0, 0))
    with (
        socket.socket(socket.AF_UNIX) as stale,
        socket.socket(socket.AF_UNIX) as active,
        open(opened / "logs" / "rank_0.log"),
    ):
        stale.bind(str(copies / "run_stale.sock"))
        active.bind(str(copies / "run_active.sock"))
        active.listen()
        assert list_unused(cli, storage) == ["0123", "run_stale.sock", old.name]
        assert cli("clean", storage, "--yes").code == 0
    assert sorted(path.name for path in copies.iterdir()) == ["checkpoint_new", "run_active.sock"]
    assert not old.exists()


def test_clean_keeps_user_files_and_link_targets(
    cli: Command, storage: Path, tmp_path: Path
) -> None:
    run = storage / "long"
    # A user's copy of a checkpoint whose original was deleted.
    shutil.copytree(run / "checkpoint_000000", run / "best")
    shutil.rmtree(run / "checkpoint_000000")
    (tmp_path / "user").mkdir()
    shutil.move(storage / "short", tmp_path / "user" / "short")
    (storage / "short").symlink_to(tmp_path / "user" / "short")
    (tmp_path / "user" / "stage").mkdir()
    (run / ".staging").symlink_to(tmp_path / "user")
    assert list_unused(cli, storage, "--keep", 1) == ["checkpoint_000001"]
    (run / ".staging").unlink()
    assert cli("clean", storage, "--keep", 1, "--yes").code == 0
    assert sorted(path.name for path in run.glob("[bc]*t*")) == ["best", "checkpoint_000002"]
    assert len(list((storage / "short").glob("checkpoint_*"))) == 2


def test_unused_file_of_resumed_run_is_not_removed(storage: Path) -> None:
    stage = storage / "long" / ".staging" / "stage"
    stage.mkdir(parents=True)
    (file,) = find_run(storage / "long").find_unused_files()
    with open(storage / "long" / "journal.jsonl", "ab") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)  # the run is resumed now
        with pytest.raises(RunInProgressError, match="is in use by a run in another process"):
            file.remove()
    assert stage.exists()


class _ReadOnlyRun(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Object store in which the files of one run can be protected."""

    protocol = ("protected",)
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    is_protected = False

    def rm_file(self, path: str) -> None:
        if self.is_protected and "/first/" in path:
            raise PermissionError(errno.EACCES, "Access denied", path)
        super().rm_file(path)


def test_clean_reports_failed_files_and_deletes_others(
    cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    fsspec.register_implementation("protected", _ReadOnlyRun)
    for name in ("first", "second"):
        make_run("protected://runs", name, 2)
    monkeypatch.setattr(_ReadOnlyRun, "is_protected", True)
    result = cli("clean", "protected://runs", "--keep", 1, "--yes", "--json")
    data = json.loads(result.out)
    assert [file["path"].split("/")[-2:] for file in data["files"]] == [
        ["second", "checkpoint_000000"]
    ]
    ((path, reason),) = data["failed"].items()
    assert path.endswith("first/checkpoint_000000")
    assert "Access denied" in reason
    assert (result.code, f"Could not delete {path}: " in result.err) == (2, True)


def test_clean_deletes_unused_files_in_object_store(cli: Command) -> None:
    address = "memory://clean"
    make_run(f"{address}/runs", "run", 2)
    files = fsspec.filesystem("memory")
    files.rm("/clean/runs/run/checkpoint_000000/.drawbar.json")
    (name,) = list_unused(cli, f"{address}/runs/run")
    assert name == "checkpoint_000000"
    assert cli("clean", f"{address}/runs", "--keep", 1, "--yes").code == 0
    assert not files.exists("/clean/runs/run/checkpoint_000000/model")
    assert [manifest.name for manifest in find_run(f"{address}/runs/run").list_checkpoints()] == [
        "checkpoint_000001"
    ]


def test_clean_skips_object_store_run_of_unknown_status(cli: Command) -> None:
    address = "memory://hosted"
    make_run(address, "run", 2)
    files = fsspec.filesystem("memory")
    files.rm("/hosted/run/checkpoint_000001/.drawbar.json")  # as before its commit
    journal = files.cat_file("/hosted/run/journal.jsonl")
    files.pipe_file("/hosted/run/journal.jsonl", journal[: journal.rindex(b"{")])
    assert find_run(f"{address}/run").status == "unknown"
    assert list_unused(cli, address, "--keep", 1) == []


def test_clean_skips_running_run(storage: Path, cli: Command) -> None:
    (storage / "long" / ".staging" / "stage-1").mkdir(parents=True)
    with open(storage / "long" / "journal.jsonl", "ab") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        assert list_unused(cli, storage, "--keep", 1) == ["checkpoint_000000"]  # of `short`


def test_clean_keep_does_not_count_damaged_checkpoints(cli: Command, storage: Path) -> None:
    newest = find_run(storage / "long").list_checkpoints()[-1]
    file = next(
        path
        for path in (storage / "long" / newest.name).rglob("*")
        if path.is_file() and not path.name.startswith(".") and path.stat().st_size
    )
    file.write_bytes(b"")
    assert list_unused(cli, storage / "long", "--keep", 1) == ["checkpoint_000000"]
