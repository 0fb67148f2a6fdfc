"""`drawbar clean` says what may go, and deletes it only when told."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.cli._commands.clean import _delete_all
from drawbar.train import (
    DataParallelTrainer,
    FailureConfig,
    ResumeError,
    RunConfig,
    ScalingConfig,
    WorkerGroupError,
)
from drawbar.train.runs import find_run, list_runs
from drawbar.train.testing import check_run
from tests.cli.conftest import Command, fit


@pytest.fixture(autouse=True)
def own_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of temporary files and a cache of the test's own."""
    machine = tmp_path / "machine"
    machine.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(machine))
    monkeypatch.setenv("XDG_CACHE_HOME", str(machine / "cache"))
    return machine


def found(drawbar: Command, *arguments: object) -> list[str]:
    told = json.loads(drawbar("clean", *arguments, "--json").out)
    return [Path(each["path"]).name for each in told["found"]]


def test_a_storage_without_leftovers_stays_as_it_is(drawbar: Command, storage: Path) -> None:
    before = sorted(storage.rglob("*"))
    assert drawbar("clean", storage, "--yes").out == "nothing to delete\n"
    assert sorted(storage.rglob("*")) == before


@pytest.mark.usefixtures("ray_cluster")
def test_ended_run_leaves_no_staging_and_no_exit_reports(drawbar: Command, tmp_path: Path) -> None:
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
        left = [path.name for path in (tmp_path / f"run_{fails}").glob(".*")]
        assert left == []
    assert found(drawbar, tmp_path) == []


def test_what_was_never_committed_goes_and_what_was_handed_over_stays(
    drawbar: Command, storage: Path
) -> None:
    stage = storage / "long" / ".staging" / "stage-1"
    stage.mkdir(parents=True)
    (stage / "model").write_text("half")
    told = drawbar("clean", storage)
    assert "uncommitted files" in told.out
    assert "would be deleted; --yes deletes it" in told.out
    assert stage.exists()
    assert drawbar("clean", storage, "--yes").code == 0
    assert not stage.exists()
    assert found(drawbar, storage) == []


def test_a_terminal_that_is_narrower_than_a_path_costs_no_word(
    drawbar: Command, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = storage / "long" / ".staging" / "stage-1"
    stage.mkdir(parents=True)
    (stage / "model").write_text("half")
    monkeypatch.setenv("COLUMNS", "40")
    first = drawbar("clean", storage).out.splitlines()[0]
    assert first.split("  ") == ["4 bytes", "uncommitted files", str(stage.parent)]


def test_old_checkpoints_go_by_the_rule_of_the_run(drawbar: Command, storage: Path) -> None:
    old = ["checkpoint_000000", "checkpoint_000001"]
    assert found(drawbar, storage / "long", "--keep", 1) == old
    assert drawbar("clean", storage / "long", "--keep", 1, "--yes").code == 0
    run = find_run(storage / "long")
    assert [each.name for each in run.list_checkpoints()] == ["checkpoint_000002"]
    assert run.status == "finished"
    check_run(run.path)
    with pytest.raises(ResumeError, match="holds a finished run"):  # as it was
        fit(storage, "long", 3, resume="never")


def test_leftovers_of_this_machine_go_when_nobody_needs_them(
    drawbar: Command, storage: Path, own_machine: Path
) -> None:
    copies = own_machine / f"drawbar-{os.geteuid()}"
    copies.mkdir(mode=0o700)
    (copies / "0123").mkdir()
    (copies / "checkpoint_new").mkdir()
    os.utime(copies / "0123", (0, 0))
    cache = own_machine / "cache" / "drawbar"
    old = cache / "old-0123456789ab"
    fresh, open_, kept, other = (cache / f"{name}-0123456789ab" for name in "abcd")
    for folder, inside in (
        (old, "logs/rank_0.log"),
        (fresh, "logs/rank_0.log"),  # a rank writes
        (open_, "logs/rank_0.log"),  # a rank may yet
        (kept, ".uncommitted/0.name/model"),  # was handed over
        (other, "model"),
        (cache / "datasets", "images"),  # is nobody's work folder
    ):
        file = folder / inside
        file.parent.mkdir(parents=True)
        file.touch()
        for path in (file, *file.parents[: len(Path(inside).parts)]):
            os.utime(path, None if path == fresh / inside else (0, 0))
    with (
        socket.socket(socket.AF_UNIX) as gone,
        socket.socket(socket.AF_UNIX) as there,
        open(open_ / "logs" / "rank_0.log"),
    ):
        gone.bind(str(copies / "run_gone.sock"))
        there.bind(str(copies / "run_there.sock"))
        there.listen()
        assert found(drawbar, storage) == ["0123", "run_gone.sock", old.name]
        assert drawbar("clean", storage, "--yes").code == 0
    assert sorted(path.name for path in copies.iterdir()) == ["checkpoint_new", "run_there.sock"]
    assert not old.exists()


def test_what_is_the_users_and_what_lies_behind_a_link_stays(
    drawbar: Command, storage: Path, tmp_path: Path
) -> None:
    run = storage / "long"
    # The user's copy, and the original is gone.
    shutil.copytree(run / "checkpoint_000000", run / "best")
    shutil.rmtree(run / "checkpoint_000000")
    (tmp_path / "theirs").mkdir()
    shutil.move(storage / "short", tmp_path / "theirs" / "short")
    (storage / "short").symlink_to(tmp_path / "theirs" / "short")
    (tmp_path / "theirs" / "stage").mkdir()
    (run / ".staging").symlink_to(tmp_path / "theirs")
    assert found(drawbar, storage, "--keep", 1) == ["checkpoint_000001"]
    (run / ".staging").unlink()
    assert drawbar("clean", storage, "--keep", 1, "--yes").code == 0
    assert sorted(path.name for path in run.glob("[!.]*t*")) == ["best", "checkpoint_000002"]
    assert len(list((storage / "short").glob("checkpoint_*"))) == 2


def test_what_cannot_be_deleted_is_named_and_the_rest_goes(storage: Path) -> None:
    stages = [storage / name / ".staging" / "stage" for name in ("long", "short")]
    for stage in stages:
        stage.mkdir(parents=True)
    leftovers = [each for run in list_runs(storage) for each in run.find_unused_files()]
    with open(storage / "long" / "journal.jsonl", "ab") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)  # it goes on from here
        stays = _delete_all(leftovers)
    assert list(stays) == [str(stages[0].parent)]
    assert "is in use by a run in another process" in stays[str(stages[0].parent)]
    assert [stage.exists() for stage in stages] == [True, False]


def test_leftovers_of_an_object_store_go_too(drawbar: Command) -> None:
    import fsspec

    address = "memory://clean"
    fit(f"{address}/runs", "there", 2)
    files = fsspec.filesystem("memory")
    files.rm("/clean/runs/there/checkpoint_000000/.drawbar.json")
    (name,) = found(drawbar, f"{address}/runs/there")
    assert name == "checkpoint_000000"
    assert drawbar("clean", f"{address}/runs", "--keep", 1, "--yes").code == 0
    assert not files.exists("/clean/runs/there/checkpoint_000000/model")
    assert [each.name for each in find_run(f"{address}/runs/there").list_checkpoints()] == [
        "checkpoint_000001"
    ]


def test_a_run_that_another_machine_may_host_is_left_alone(drawbar: Command) -> None:
    import fsspec

    address = "memory://hosted"
    fit(address, "there", 2)
    files = fsspec.filesystem("memory")
    files.rm("/hosted/there/checkpoint_000001/.drawbar.json")  # as before its commit
    journal = files.cat_file("/hosted/there/journal.jsonl")
    files.pipe_file("/hosted/there/journal.jsonl", journal[: journal.rindex(b"{")])
    assert find_run(f"{address}/there").status == "unknown"
    assert found(drawbar, address, "--keep", 1) == []


def test_a_run_that_goes_on_is_left_alone(storage: Path, drawbar: Command) -> None:
    (storage / "long" / ".staging" / "stage-1").mkdir(parents=True)
    with open(storage / "long" / "journal.jsonl", "ab") as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        assert found(drawbar, storage, "--keep", 1) == ["checkpoint_000000"]  # of `short`
