"""Nothing of the user's is touched: what links lead to, other runs, what is handed over, names."""

from __future__ import annotations

import os
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
from drawbar.train._storage.contents import METADATA_FILE, list_files
from drawbar.train._storage.files import FileIdentities
from drawbar.train._storage.staging import AssignedFiles, StagingArea
from drawbar.train.testing import run_in_threads
from tests.train.local_runs import ASYNC, fit, save

SYNC, NO_UPLOAD = CheckpointUploadMode.SYNC, CheckpointUploadMode.NO_UPLOAD
HANDED_OVER: dict[str, Any] = {"delete_local_checkpoint_after_upload": True}


def write(folder: Path, **files: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def content(place: Any) -> dict[str, str]:
    files = [file.path for file in list_files(Path(place)) if file.path != METADATA_FILE]
    return {path: (Path(place) / path).read_text(errors="replace") for path in files}


def links_in(place: Any) -> list[Path]:
    return [path for path in Path(place).rglob("*") if path.is_symlink()]


def with_links(folder: Path, far: Path) -> None:
    """Links to a file, to a folder, in a chain, relative ones, and the layout of a hub's cache."""
    write(folder, own="o")
    write(folder / "blobs", hash="weights")
    (folder / "snapshots" / "main").mkdir(parents=True)
    (folder / "snapshots" / "main" / "model").symlink_to("../../blobs/hash")
    (folder / "file").symlink_to(far / "x")
    (folder / "chain").symlink_to("file")
    (folder / "folder").symlink_to(far)
    write(far, x="x")
    write(far / "deep", y="y")
    (far / "inner").symlink_to("deep")


LINKED = {
    "own": "o",
    "blobs/hash": "weights",
    "snapshots/main/model": "weights",
    "file": "x",
    "chain": "x",
    "folder/x": "x",
    "folder/deep/y": "y",
    "folder/inner/y": "y",
}
FAR = {"x": "x", "deep/y": "y", "inner/y": "y"}


def check_linked(result: Result, far: Path) -> None:
    assert result.checkpoint is not None
    result.checkpoint.verify()
    assert content(result.checkpoint) == LINKED
    assert not links_in(result.checkpoint)
    assert content(far) == FAR
    assert (far / "inner").is_symlink()


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
@pytest.mark.parametrize("options", [{}, HANDED_OVER])
def test_what_lies_behind_links_is_copied_from_a_folder(
    tmp_path: Path, mode: CheckpointUploadMode, options: dict[str, Any]
) -> None:
    own, far = tmp_path / "own", tmp_path / "far"

    def function() -> None:
        with_links(own, far)
        train.report({}, checkpoint=own, checkpoint_upload_mode=mode, **options)

    check_linked(fit(function, tmp_path), far)
    assert own.exists() is (mode is SYNC and not options)


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_what_lies_behind_links_is_copied_into_a_staged_checkpoint(
    tmp_path: Path, mode: CheckpointUploadMode
) -> None:
    far = tmp_path / "far"

    def function() -> int:
        with train.checkpoint_dir() as path:
            with_links(path, far)
            inode = (path / "own").stat().st_ino
            train.report({}, checkpoint=path, checkpoint_upload_mode=mode)
        return inode

    result = fit(function, tmp_path)
    check_linked(result, far)
    assert os.stat(Path(result.checkpoint or "") / "own").st_ino == result.return_value


def test_links_of_several_ranks_are_merged(tmp_path: Path) -> None:
    """One of the linked folders grows before the commit."""

    def function() -> None:
        rank = train.get_context().get_world_rank()
        far = write(tmp_path / f"far_{rank}", x=str(rank))
        with train.checkpoint_dir() as path:
            (path / f"folder_{rank}").symlink_to(far)
            (path / "latest").symlink_to(f"folder_{rank}/x")
            if rank == 1:
                write(tmp_path / "far_0", later="stays")
            train.report({}, checkpoint=path)

    result = run_in_threads(function, run_config=RunConfig(name="run", storage_path=tmp_path))
    found = content(result.checkpoint)
    found.pop("folder_0/later", None)
    assert found == {"folder_0/x": "0", "folder_1/x": "1", "latest": "0"}
    assert not links_in(result.checkpoint)
    assert content(tmp_path / "far_0") == {"x": "0", "later": "stays"}
    assert content(tmp_path / "far_1") == {"x": "1"}


def test_links_that_ranks_make_in_one_directory(tmp_path: Path) -> None:
    def function() -> None:
        rank = train.get_context().get_world_rank()
        far = write(tmp_path / f"far_{rank}", x=str(rank))
        with train.checkpoint_dir() as own:
            shared = collective.broadcast_from_rank_zero(own)
            (shared / f"folder_{rank}").symlink_to(far)
            collective.barrier()
            train.report({}, checkpoint=shared)

    result = run_in_threads(function, run_config=RunConfig(name="run", storage_path=tmp_path))
    assert content(result.checkpoint) == {"folder_0/x": "0", "folder_1/x": "1"}
    assert not links_in(result.checkpoint)
    assert [content(tmp_path / f"far_{rank}") for rank in (0, 1)] == [{"x": "0"}, {"x": "1"}]


def test_links_in_a_directory_of_the_run_are_replaced_where_it_lies(tmp_path: Path) -> None:
    far = tmp_path / "far"

    def function() -> None:
        with_links(tmp_path / "run" / "mine", far)
        place = tmp_path / "run" / "mine"
        train.report({}, checkpoint=place, checkpoint_upload_mode=NO_UPLOAD)

    check_linked(fit(function, tmp_path), far)


def test_of_a_checkpoint_that_is_a_link_the_link_is_given_away(tmp_path: Path) -> None:
    def function() -> None:
        (tmp_path / "latest").symlink_to(write(tmp_path / "own", model="m"))
        train.report({}, checkpoint=tmp_path / "latest", **HANDED_OVER)

    assert content(fit(function, tmp_path).checkpoint) == {"model": "m"}
    assert not (tmp_path / "latest").is_symlink()
    assert content(tmp_path / "own") == {"model": "m"}


def test_retention_deletes_no_more_than_the_link_that_a_checkpoint_was_replaced_by(
    tmp_path: Path,
) -> None:
    moved = tmp_path / "moved"

    def function() -> None:
        save("a")
        first = tmp_path / "run" / "checkpoint_000000"
        first.rename(moved)
        first.symlink_to(moved)
        save("b")

    config = train.CheckpointConfig(num_to_keep=1)
    fit(function, tmp_path, checkpoint_config=config)
    assert content(moved) == {"model": "a"}
    assert not (tmp_path / "run" / ".staging").exists()


@pytest.mark.parametrize(
    "place", ["", "run", "run/logs", "run/.staging", "run/.workers", "link", "link/logs", "run/.."]
)
@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_what_drawbar_keeps_is_no_checkpoint(
    tmp_path: Path, place: str, mode: CheckpointUploadMode
) -> None:
    storage = tmp_path / "storage"

    def function() -> None:
        save("a")
        (storage / "link").symlink_to("run")
        delete = mode is ASYNC
        train.report(
            {},
            checkpoint=f"{storage}/{place}",
            checkpoint_upload_mode=mode,
            delete_local_checkpoint_after_upload=delete,
        )

    with pytest.raises(WorkerGroupError, match="holds what Drawbar keeps of the run"):
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
        internal.rename(mine)  # which keeps the inode, on any filesystem
        write(mine, model="b")
        train.report({}, checkpoint=mine)

    result = fit(function, tmp_path)
    assert content(result.checkpoint) == {"model": "b"}


def test_the_runs_logs_are_no_checkpoint_in_place(tmp_path: Path) -> None:
    def function() -> None:
        place = tmp_path / "run" / "logs"
        train.report({}, checkpoint=place, checkpoint_upload_mode=NO_UPLOAD)

    with pytest.raises(WorkerGroupError, match="holds what Drawbar keeps of the run"):
        fit(function, tmp_path)


@pytest.mark.parametrize("place", ["run", "", "run/checkpoint_000000", "run/mine"])
def test_what_belongs_to_another_run_is_copied_and_stays(tmp_path: Path, place: str) -> None:
    other = tmp_path / "other"
    fit(lambda: save("a"), other)
    write(other / "run" / "mine", notes="n")
    before = content(other)

    def function() -> None:
        train.report({}, checkpoint=other / place, checkpoint_upload_mode=ASYNC, **HANDED_OVER)

    result = fit(function, tmp_path)
    assert content(result.checkpoint).items() >= content(other / place).items()
    assert content(other) == before
    Checkpoint(other / "run" / "checkpoint_000000").verify()


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_what_was_handed_over_is_kept_if_the_commit_does_not_come(
    tmp_path: Path, mode: CheckpointUploadMode, caplog: pytest.LogCaptureFixture
) -> None:
    own, kept = tmp_path / "own", tmp_path / "run" / ".uncommitted" / "rank_0.checkpoint_000001"

    def function() -> None:
        save("a")
        if train.get_context().get_world_rank() == 1:
            collective.barrier()
            raise RuntimeError("on purpose")
        write(own, model="m")
        if mode is SYNC:
            collective.barrier()
        train.report({}, checkpoint=own, checkpoint_upload_mode=mode, **HANDED_OVER)
        collective.barrier()

    with pytest.raises(WorkerGroupError, match="on purpose"):
        run_in_threads(function, run_config=RunConfig(name="run", storage_path=tmp_path))
    assert content(own if mode is SYNC else kept) == {"model": "m"}
    assert (str(kept) in caplog.text) is (mode is ASYNC)
    fit(lambda: save("b"), tmp_path)
    assert not kept.exists()


def test_a_folder_of_the_users_is_not_replaced_by_a_checkpoint(tmp_path: Path) -> None:
    users = tmp_path / "run" / "checkpoint_000001"

    def function() -> None:
        if train.get_checkpoint() is None:
            save("a")
            write(users, notes="n")
        save("b")

    for _ in range(2):
        with pytest.raises(ControllerError, match=f"{users} is there and is no checkpoint that Dr"):
            fit(function, tmp_path)
    assert content(users) == {"notes": "n"}
    users.rename(tmp_path / "away")
    assert content(fit(function, tmp_path).checkpoint) == {"model": "b"}


@pytest.mark.parametrize(
    "name", [".drawbar.json", ".drawbar-checksums.json", ".drawbar-pending", ".drawbar-x.7.tmp"]
)
def test_a_name_that_drawbar_needs_is_refused(tmp_path: Path, name: str) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / name).write_text("mine")
            train.report({}, checkpoint=path)

    with pytest.raises(WorkerGroupError, match=rf"rank 0: ValueError: the name of .*{name} is res"):
        fit(function, tmp_path)


def test_other_names_are_the_users(tmp_path: Path) -> None:
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
    found = content(checkpoint)
    assert {name: found[name] for name in names} == {name: name for name in names}


def test_a_name_that_is_no_text_is_told_with_its_path(tmp_path: Path) -> None:
    def function() -> None:
        own = write(tmp_path / "own")
        Path(os.fsdecode(os.fsencode(own) + b"/bad\xff")).write_text("x")
        train.report({}, checkpoint=own)

    with pytest.raises(WorkerGroupError, match=r"rank 0: .*/own/bad\\xff': its name is not UTF-8"):
        fit(function, tmp_path)


@pytest.mark.parametrize("name", ["a\0b", "\udcff", "n" * 256, "\u00e9" * 128])
def test_a_name_of_a_checkpoint_that_cannot_be_written_is_told(tmp_path: Path, name: str) -> None:
    with pytest.raises(WorkerGroupError, match="ValueError: checkpoint_dir_name="):
        fit(lambda: save("a", checkpoint_dir_name=name), tmp_path)


def test_a_copy_that_lies_beside_a_checkpoint_is_the_users(tmp_path: Path) -> None:
    fit(lambda: save("a"), tmp_path)
    run = tmp_path / "run"
    shutil.copytree(run / "checkpoint_000000", run / "best")
    keep_one = CheckpointConfig(num_to_keep=1)
    assert Result.from_path(run).checkpoint == Checkpoint(run / "checkpoint_000000")
    for text in "bc":
        fit(lambda text=text: save(text), tmp_path, checkpoint_config=keep_one)
    assert content(run / "best") == {"model": "a"}
    assert {path.name for path in run.glob("checkpoint_*")} == {"checkpoint_000002"}


def test_a_checkpoint_has_checksums_however_long_its_name_is(tmp_path: Path) -> None:
    fit(lambda: save("a", checkpoint_dir_name="x" * 255), tmp_path)
    assert (tmp_path / "run" / ("x" * 255) / ".drawbar-checksums.json").exists()


def test_a_folder_that_was_reported_already_is_said_to_be_gone(tmp_path: Path) -> None:
    def function() -> None:
        with train.checkpoint_dir() as path:
            train.report({}, checkpoint=path)
            train.report({}, checkpoint=path)

    with pytest.raises(WorkerGroupError, match=r"checkpoint_dir\(\) is moved by its report"):
        fit(function, tmp_path)


@pytest.mark.parametrize("where", ["", "below"])
@pytest.mark.parametrize("is_home", [True, False])
def test_where_one_is_at_home_is_copied_and_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, is_home: bool
) -> None:
    here = tmp_path / "here"
    (here / where).mkdir(parents=True)
    (here / "model").write_text("m")
    if is_home:
        monkeypatch.setenv("HOME", str(here / where))
    else:
        monkeypatch.chdir(here / where)

    def function() -> None:
        train.report({}, checkpoint=here, checkpoint_upload_mode=ASYNC)

    assert content(fit(function, tmp_path / "runs").checkpoint) == {"model": "m"}
    assert (here / "model").read_text() == "m"


@pytest.mark.parametrize("kind", ["local", "links", "object store"])
def test_ranks_may_hand_over_one_folder(tmp_path: Path, kind: str) -> None:
    own, far = tmp_path / "own", write(tmp_path / "far", x="x")

    def function() -> None:
        rank = train.get_context().get_world_rank()
        for text in "ab":
            if rank == 0:
                write(own / "deep", model=text)
                if kind == "links":
                    (own / "folder").symlink_to(far)
            for turn in range(3):
                collective.barrier()
                if turn == 2 - rank:
                    train.report({}, checkpoint=own, checkpoint_upload_mode=ASYNC)

    storage_path = f"memory://{uuid.uuid4().hex}" if kind == "object store" else str(tmp_path)
    config = RunConfig(name="run", storage_path=storage_path)
    result = run_in_threads(function, num_workers=3, run_config=config)
    linked = {"folder/x": "x"} if kind == "links" else {}
    for (checkpoint, _), text in zip(result.best_checkpoints, "ab", strict=True):
        checkpoint.verify()
        with checkpoint.as_directory() as folder:
            assert content(folder) == {"deep/model": text, **linked}
    assert not own.exists()
    assert content(far) == {"x": "x"}


def test_ranks_delete_one_folder_while_one_of_them_fills_it_anew(tmp_path: Path) -> None:
    own = tmp_path / "own"

    def function() -> None:
        for turn in range(8):
            if train.get_context().get_world_rank() == 0:
                for number in range(100):
                    write(own / f"{number}" / "deep", model=f"{turn}")
            collective.barrier()
            train.report({}, checkpoint=own, **HANDED_OVER)

    config = RunConfig(name="run", storage_path=str(tmp_path))
    result = run_in_threads(function, num_workers=4, run_config=config)
    for turn, (checkpoint, _) in enumerate(result.best_checkpoints):
        assert list(content(checkpoint).values()) == [f"{turn}"] * 100
    assert not own.exists()


def test_only_what_was_handed_over_is_deleted(tmp_path: Path) -> None:
    own = write(tmp_path / "own", model="1", optimizer="1")
    write(own / "deep", weights="1")
    (own / "link").symlink_to("deep")
    seen = FileIdentities.capture(own, list_files(own))
    shutil.rmtree(own)
    write(own, model="2")
    (own / "deep").mkdir()
    seen.remove_unchanged(was_moved=False)
    assert content(own) == {"model": "2"}
    assert (own / "deep").is_dir()
    FileIdentities.capture(own, list_files(own)).remove_unchanged(was_moved=False)
    assert not own.exists()


def test_a_folder_that_is_handed_over_keeps_to_who_may_read_the_run(tmp_path: Path) -> None:
    def function() -> None:
        own = tempfile.mkdtemp(dir=tmp_path)
        write(Path(own), model="m")
        train.report({}, checkpoint=own, checkpoint_upload_mode=ASYNC)

    checkpoint = fit(function, tmp_path).checkpoint
    assert checkpoint is not None
    assert Path(checkpoint.path).stat().st_mode == (tmp_path / "run" / "logs").stat().st_mode


@pytest.mark.parametrize("links", [False, True])
def test_what_comes_into_a_folder_while_it_is_handed_over_is_not_deleted(
    tmp_path: Path, links: bool
) -> None:
    own, staging = write(tmp_path / "own", model="m"), StagingArea(tmp_path / ".staging")
    staging.path.mkdir()
    if links:
        (own / "link").symlink_to(write(tmp_path / "far", x="x") / "x")
    share = AssignedFiles(own, list_files(own), "rank_0", "c", should_move=True)
    write(own / "deep", late="l")
    stage = staging.stage_moved(share, attempt=0)
    assert staging.find_moved(own, "c", attempt=0) == stage
    assert staging.find_moved(own, "c", attempt=1) is None
    late = {"deep/late": "l"}
    assert content(stage) == {"model": "m", **({"link": "x"} if links else late)}
    assert (content(own) if own.exists() else {}) == (late if links else {})


def test_what_comes_into_a_folder_while_it_is_uploaded_is_not_deleted(tmp_path: Path) -> None:
    own = tmp_path / "own"

    def upload(checkpoint: Checkpoint, name: str) -> Checkpoint:
        place = shutil.copytree(checkpoint.path, train.get_context().get_storage() / name)
        write(own / "deep", late="l")
        return Checkpoint(place)

    def function() -> None:
        write(own, model="m")
        write(own / "deep", part="p")
        train.report({}, checkpoint=own, checkpoint_upload_fn=upload, **HANDED_OVER)

    assert content(fit(function, tmp_path).checkpoint) == {"model": "m", "deep/part": "p"}
    assert content(own) == {"deep/late": "l"}
