"""Tests of directory listings: links, unsupported entries, and files of other ranks."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from drawbar.train._storage.contents import list_files
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._storage.staging import hold_file_lock


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create_directories()
    return directory


def test_list_files_follows_links_and_skips_empty_directories(tmp_path: Path) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "far" / "deep" / "model").write_text("m")
    directory = tmp_path / "directory"
    (directory / "empty").mkdir(parents=True)
    (directory / "link").symlink_to(tmp_path / "far")
    (directory / "again").symlink_to("link/deep/model")
    found = {file.path: (directory / file.path).read_text() for file in list_files(directory)}
    assert found == {"link/deep/model": "m", "again": "m"}


@pytest.mark.parametrize(
    ("add_entry", "message"),
    [
        (
            lambda directory: (directory / "a" / "up").symlink_to(directory),
            "a symbolic link back to",
        ),
        (lambda directory: (directory / "a" / "self").symlink_to("."), "a symbolic link back to"),
        (
            lambda directory: (directory / "nowhere").symlink_to("gone"),
            "to gone, which does not exist",
        ),
        (lambda directory: os.mkfifo(directory / "pipe"), "neither a file nor a directory"),
    ],
)
def test_list_files_with_unsupported_entry_raises(
    tmp_path: Path, add_entry: Any, message: str
) -> None:
    (tmp_path / "a").mkdir()
    add_entry(tmp_path)
    with pytest.raises(OSError, match=message):
        list_files(tmp_path)


def test_list_files_with_mutual_links_raises(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "over").symlink_to(f"../{other}")
    with pytest.raises(OSError, match="a symbolic link back to"):
        list_files(tmp_path)


def test_scan_directory_waits_for_link_replaced_by_other_rank(run: RunDirectory) -> None:
    directory = run.staging.make_directory("rank_0") / "directory"
    directory.symlink_to("nowhere")
    lock, is_locked = run.staging.path / "links.lock", threading.Event()

    def replace() -> None:
        with hold_file_lock(lock):
            is_locked.set()
            while not has_waiters(lock):
                pass
            directory.unlink()
            directory.mkdir()
            (directory / "x").write_text("1")

    other = threading.Thread(target=replace, daemon=True)
    other.start()
    is_locked.wait()
    assert [file.path for file in run.staging.scan_directory(directory.parent).files] == [
        "directory/x"
    ]
    other.join()


def has_waiters(lock: Path) -> bool:
    inode = f":{lock.stat().st_ino} "
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and inode in line for line in lines)
