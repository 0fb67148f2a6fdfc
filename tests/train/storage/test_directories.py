"""Tests of directories: listings, sizes, moves into the staging area, and deletions."""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest

from drawbar._base.wording import format_size
from drawbar._storage.contents import format_exact_size, list_files
from drawbar._storage.files import FileIdentities
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.staging import AssignedFiles, StagingArea, hold_file_lock
from tests.train.storage.user_directories import content, write


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


def test_remove_unchanged_keeps_replaced_files(tmp_path: Path) -> None:
    source = write(tmp_path / "source", model="1", optimizer="1")
    write(source / "deep", weights="1")
    (source / "link").symlink_to("deep")
    identities = FileIdentities.capture(source, list_files(source))
    shutil.rmtree(source)
    write(source, model="2")
    (source / "deep").mkdir()
    identities.remove_unchanged(was_moved=False)
    assert content(source) == {"model": "2"}
    assert (source / "deep").is_dir()
    FileIdentities.capture(source, list_files(source)).remove_unchanged(was_moved=False)
    assert not source.exists()


@pytest.mark.parametrize("links", [False, True])
def test_files_added_while_directory_is_moved_are_kept(tmp_path: Path, links: bool) -> None:
    source, staging = write(tmp_path / "source", model="m"), StagingArea(tmp_path / ".staging")
    staging.path.mkdir()
    if links:
        (source / "link").symlink_to(write(tmp_path / "far", x="x") / "x")
    assigned = AssignedFiles(source, list_files(source), "rank_0", "c", should_move=True)
    write(source / "deep", late="l")
    staging_directory = staging.stage_moved(assigned, attempt=0)
    assert staging.find_moved(source, "c", attempt=0) == staging_directory
    assert staging.find_moved(source, "c", attempt=1) is None
    late = {"deep/late": "l"}
    assert content(staging_directory) == {"model": "m", **({"link": "x"} if links else late)}
    assert (content(source) if source.exists() else {}) == (late if links else {})


@pytest.mark.parametrize(
    ("nbytes", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (999_400, "999 kB"),
        (999_900, "1 MB"),
        (1_234_567, "1.23 MB"),
        (3_100_000_000, "3.1 GB"),
        (5 * 10**12, "5 TB"),
        (5 * 10**15, "5e+03 TB"),
    ],
)
def test_format_size_uses_suitable_unit(nbytes: int, expected: str) -> None:
    assert format_size(nbytes) == expected


def test_format_exact_size_includes_byte_count() -> None:
    assert (format_exact_size(5), format_exact_size(90_000)) == ("5 bytes", "90 kB (90000 bytes)")
