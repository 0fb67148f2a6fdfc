"""Tests that the targets of links in reported directories are copied and not changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar.train import CheckpointUploadMode, Result, RunConfig, collective
from drawbar.train.testing import run_in_threads
from tests.train.runs import fit
from tests.train.storage.user_directories import content, write
from tests.train.text_checkpoints import ASYNC, save

SYNC, NO_UPLOAD = CheckpointUploadMode.SYNC, CheckpointUploadMode.NO_UPLOAD
MOVED: dict[str, Any] = {"delete_local_checkpoint_after_upload": True}


def find_links(directory: Any) -> list[Path]:
    return [path for path in Path(directory).rglob("*") if path.is_symlink()]


def write_links(directory: Path, far: Path) -> None:
    """Create relative, absolute, and chained links to files and directories."""
    write(directory, own="o")
    write(directory / "blobs", hash="weights")
    (directory / "snapshots" / "main").mkdir(parents=True)
    (directory / "snapshots" / "main" / "model").symlink_to("../../blobs/hash")
    (directory / "file").symlink_to(far / "x")
    (directory / "chain").symlink_to("file")
    (directory / "directory").symlink_to(far)
    write(far, x="x")
    write(far / "deep", y="y")
    (far / "inner").symlink_to("deep")


LINKED = {
    "own": "o",
    "blobs/hash": "weights",
    "snapshots/main/model": "weights",
    "file": "x",
    "chain": "x",
    "directory/x": "x",
    "directory/deep/y": "y",
    "directory/inner/y": "y",
}


FAR = {"x": "x", "deep/y": "y", "inner/y": "y"}


def check_links_are_copied(result: Result, far: Path) -> None:
    assert result.checkpoint is not None
    result.checkpoint.verify()
    assert content(result.checkpoint) == LINKED
    assert not find_links(result.checkpoint)
    assert content(far) == FAR
    assert (far / "inner").is_symlink()


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
@pytest.mark.parametrize("options", [{}, MOVED])
def test_report_of_directory_with_links_copies_link_targets(
    tmp_path: Path, mode: CheckpointUploadMode, options: dict[str, Any]
) -> None:
    source, far = tmp_path / "source", tmp_path / "far"

    def function() -> None:
        write_links(source, far)
        train.report({}, checkpoint=source, checkpoint_upload_mode=mode, **options)

    check_links_are_copied(fit(function, tmp_path), far)
    assert source.exists() is (mode is SYNC and not options)


@pytest.mark.parametrize("mode", [SYNC, ASYNC])
def test_report_of_staged_checkpoint_with_links_copies_targets(
    tmp_path: Path, mode: CheckpointUploadMode
) -> None:
    far = tmp_path / "far"

    def function() -> int:
        with train.checkpoint_dir() as path:
            write_links(path, far)
            inode = (path / "own").stat().st_ino
            train.report({}, checkpoint=path, checkpoint_upload_mode=mode)
        return inode

    result = fit(function, tmp_path)
    check_links_are_copied(result, far)
    assert os.stat(Path(result.checkpoint or "") / "own").st_ino == result.return_value


def test_report_merges_links_of_several_ranks(tmp_path: Path) -> None:
    """Merge links of several ranks although a linked directory grows before the commit."""

    def function() -> None:
        rank = train.get_context().get_world_rank()
        far = write(tmp_path / f"far_{rank}", x=str(rank))
        with train.checkpoint_dir() as path:
            (path / f"directory_{rank}").symlink_to(far)
            (path / "latest").symlink_to(f"directory_{rank}/x")
            if rank == 1:
                write(tmp_path / "far_0", later="stays")
            train.report({}, checkpoint=path)

    result = run_in_threads(function, run_config=RunConfig(name="run", storage_path=tmp_path))
    files = content(result.checkpoint)
    files.pop("directory_0/later", None)
    assert files == {"directory_0/x": "0", "directory_1/x": "1", "latest": "0"}
    assert not find_links(result.checkpoint)
    assert content(tmp_path / "far_0") == {"x": "0", "later": "stays"}
    assert content(tmp_path / "far_1") == {"x": "1"}


def test_report_of_shared_directory_replaces_links_of_all_ranks(tmp_path: Path) -> None:
    def function() -> None:
        rank = train.get_context().get_world_rank()
        far = write(tmp_path / f"far_{rank}", x=str(rank))
        with train.checkpoint_dir() as path:
            shared = collective.broadcast_from_rank_zero(path)
            (shared / f"directory_{rank}").symlink_to(far)
            collective.barrier()
            train.report({}, checkpoint=shared)

    result = run_in_threads(function, run_config=RunConfig(name="run", storage_path=tmp_path))
    assert content(result.checkpoint) == {"directory_0/x": "0", "directory_1/x": "1"}
    assert not find_links(result.checkpoint)
    assert [content(tmp_path / f"far_{rank}") for rank in (0, 1)] == [{"x": "0"}, {"x": "1"}]


def test_no_upload_in_run_directory_replaces_links_in_place(tmp_path: Path) -> None:
    far = tmp_path / "far"

    def function() -> None:
        write_links(tmp_path / "run" / "mine", far)
        path = tmp_path / "run" / "mine"
        train.report({}, checkpoint=path, checkpoint_upload_mode=NO_UPLOAD)

    check_links_are_copied(fit(function, tmp_path), far)


def test_moved_checkpoint_that_is_a_link_deletes_only_the_link(tmp_path: Path) -> None:
    def function() -> None:
        (tmp_path / "latest").symlink_to(write(tmp_path / "own", model="m"))
        train.report({}, checkpoint=tmp_path / "latest", **MOVED)

    assert content(fit(function, tmp_path).checkpoint) == {"model": "m"}
    assert not (tmp_path / "latest").is_symlink()
    assert content(tmp_path / "own") == {"model": "m"}


def test_retention_of_linked_checkpoint_deletes_only_the_link(
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
