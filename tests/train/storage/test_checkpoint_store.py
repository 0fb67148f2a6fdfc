"""Tests of commits, checksums, and deletion in the local checkpoint store and the staging area."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from drawbar._history.run_history import RunHistory
from drawbar._storage.checkpoint_store import CheckpointDraft
from drawbar._storage.contents import (
    CHECKSUMS_FILE,
    MANIFEST_FILE,
    METADATA_FILE,
    VALIDATION_FILE,
    FileEntry,
    list_files,
)
from drawbar._storage.files import remove_tree, write_atomically
from drawbar._storage.filesystem import resolve_path
from drawbar._storage.remote_path import RemotePath
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.staging import AssignedFiles, StagedFiles, make_shared_name
from drawbar.train import Checkpoint, CheckpointError, DamagedRunError, Manifest

MOVED_IN = 0x80  # inotify event
ENTRY_EVENTS = 0x40 | MOVED_IN | 0x100 | 0x200  # moved out, moved in, created, deleted


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    directory.create_directories()
    return directory


def make_staged(run: RunDirectory, files: dict[str, str], label: str = "rank_0") -> Path:
    path = run.staging.make_directory(label)
    write(path, files)
    return path


def write(directory: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text)


def read(directory: Path) -> dict[str, str]:
    return {file.path: (directory / file.path).read_text() for file in list_files(directory)}


def stage_files(path: Path, *names: str) -> StagedFiles:
    """Return all files of a directory, or those with these names, as staged files."""
    return StagedFiles(path, tuple(f for f in list_files(path) if not names or f.path in names))


def manifest(
    *staged_files: StagedFiles, name: str = "c", index: int = 0, **metrics: Any
) -> Manifest:
    manifest = Manifest(
        name=name,
        index=index,
        attempt=0,
        run_id="ab",
        world_size=len(staged_files),
        time=time.time(),
        metrics=metrics,
    )
    return manifest.with_files(file for stage_files in staged_files for file in stage_files.files)


def commit(
    run: RunDirectory,
    *staged_files: StagedFiles,
    durable: bool = False,
    metadata: bytes | None = None,
    **fields: Any,
) -> Path:
    draft = CheckpointDraft(
        manifest=manifest(*staged_files, **fields),
        staged_files=staged_files,
        durable=durable,
        metadata=metadata,
    )
    return run.local_path / run.checkpoints.commit(draft).name


@pytest.mark.parametrize("durable", [False, True])
def test_commit_of_one_rank_renames_staging_directory(run: RunDirectory, durable: bool) -> None:
    staged = make_staged(run, {"model.pt": "weights", "deep/er/state": "s"})
    inode = (staged / "model.pt").stat().st_ino
    path = commit(run, stage_files(staged), durable=durable, loss=float("nan"))
    assert read(path) == {"model.pt": "weights", "deep/er/state": "s"}
    assert (path / "model.pt").stat().st_ino == inode
    assert list(run.staging.path.iterdir()) == []
    Checkpoint(path).verify()


def test_commit_of_two_ranks_merges_by_renames(run: RunDirectory) -> None:
    first = make_staged(run, {"shard_0": "a", "both": "from 0"})
    second = make_staged(run, {"shard_1": "b", "both": "from 1", "sub/x": "x"}, label="rank_1")
    inode = (second / "shard_1").stat().st_ino
    path = commit(run, stage_files(first), stage_files(second, "shard_1", "sub/x"))
    assert read(path) == {"shard_0": "a", "both": "from 0", "shard_1": "b", "sub/x": "x"}
    assert (path / "shard_1").stat().st_ino == inode
    assert {file.name for file in second.iterdir()} == {"both", "sub"}
    assert list(run.staging.path.iterdir()) == [second]  # rank 1 deletes it


def test_commit_deletes_unlisted_files_of_first_rank(
    run: RunDirectory,
) -> None:
    first = make_staged(run, {"own": "a", "not in its share": "b"})
    path = commit(run, stage_files(first, "own"))
    assert read(path) == {"own": "a"}


def test_commit_of_shared_staging_directory(run: RunDirectory) -> None:
    shared = make_staged(run, {"shard_0": "a", "shard_1": "b"})
    path = commit(run, stage_files(shared, "shard_0"), stage_files(shared, "shard_1"))
    assert read(path) == {"shard_0": "a", "shard_1": "b"}


def test_commit_keeps_shared_directory_until_all_ranks_are_merged(
    run: RunDirectory,
) -> None:
    first, shared = (
        make_staged(run, {"a": "0"}),
        make_staged(run, {"b": "1", "c": "2"}, label="rank_1"),
    )
    path = commit(run, stage_files(first), stage_files(shared, "b"), stage_files(shared, "c"))
    assert read(path) == {"a": "0", "b": "1", "c": "2"}
    assert list(run.staging.path.iterdir()) == [first]  # rank 0 deletes it


def test_commit_of_many_ranks_merges_all_directories(run: RunDirectory) -> None:
    stages = [make_staged(run, {f"shard_{rank}": f"{rank}"}) for rank in range(40)]
    path = commit(run, *[stage_files(staged) for staged in stages])
    assert read(path) == {f"shard_{rank}": f"{rank}" for rank in range(40)}


def test_stage_files_in_shared_directory_keeps_files_of_other_ranks_on_error(
    run: RunDirectory, tmp_path: Path
) -> None:
    (tmp_path / "a").write_text("0")
    files = [FileEntry("a", 1), FileEntry("missing", 1)]
    good, bad = (
        AssignedFiles(tmp_path, files[:count], "rank", "c", False, make_shared_name(0, 1))
        for count in (1, 2)
    )
    shared = run.staging.stage_files(good)
    (shared / "b").write_text("of another rank")
    with pytest.raises(FileNotFoundError, match="writing 2 bytes"):
        run.staging.stage_files(bad)
    assert [file.name for file in shared.iterdir()] == ["b"]


def test_commit_without_files_creates_checkpoint(run: RunDirectory) -> None:
    path = commit(run)
    assert read(path) == {}
    Checkpoint(path).verify()


def test_commit_adds_trainer_metadata_unless_user_saved_some(run: RunDirectory) -> None:
    plain, custom = (
        make_staged(run, {"a": "a"}),
        make_staged(run, {"a": "a", METADATA_FILE: '{"mine": 1}'}),
    )
    for name, staged in (("plain", plain), ("custom", custom)):
        commit(run, stage_files(staged), name=name, metadata=b'{"trainer": 1}')
    assert Checkpoint(run.local_path / "plain").get_metadata() == {"trainer": 1}
    assert Checkpoint(run.local_path / "custom").get_metadata() == {"mine": 1}
    Checkpoint(run.local_path / "custom").verify()


def test_commit_with_name_of_committed_checkpoint_raises(run: RunDirectory) -> None:
    commit(run, stage_files(make_staged(run, {"a": "first"})))
    with pytest.raises(FileExistsError, match="Use a different checkpoint_dir_name"):
        commit(run, stage_files(make_staged(run, {"a": "second"})))
    assert read(run.local_path / "c") == {"a": "first"}


def test_commit_replaces_damaged_checkpoint(run: RunDirectory) -> None:
    path = commit(run, stage_files(make_staged(run, {"a": "first"})))
    (path / "a").unlink()
    commit(run, stage_files(make_staged(run, {"a": "second"})))
    assert read(path) == {"a": "second"}


@pytest.mark.parametrize("name", ["logs", ".staging", ".workers", "journal.jsonl", "trainer.pkl"])
def test_commit_with_name_of_run_file_raises(run: RunDirectory, name: str) -> None:
    run.journal_path.write_text("events")
    run.trainer_path.write_text("state")
    run.get_log_path(0).write_text("output")
    with pytest.raises(FileExistsError, match=f"/run/{name} exists, but Drawbar did not"):
        commit(run, stage_files(make_staged(run, {"a": "a"})), name=name)
    assert (run.journal_path.read_text(), run.trainer_path.read_text()) == ("events", "state")
    assert run.get_log_path(0).read_text() == "output"


def test_commit_with_missing_staged_file_raises(run: RunDirectory) -> None:
    staged = make_staged(run, {"a": "a", "b": "b"})
    offered = stage_files(staged)
    (staged / "b").unlink()
    with pytest.raises(FileNotFoundError, match="/b'"):
        commit(run, offered)
    assert run.checkpoints.list_committed() == []


def test_commit_records_size_of_file_that_grew_after_report(run: RunDirectory) -> None:
    staged = make_staged(run, {"events.log": ""})
    offered = stage_files(staged)
    (staged / "events.log").write_text("one more line")
    path = commit(run, offered)
    Checkpoint(path).verify()
    assert read(path) == {"events.log": "one more line"}


def test_clean_up_deletes_uncommitted_files(run: RunDirectory) -> None:
    path = commit(run, stage_files(make_staged(run, {"a": "a"})))
    make_staged(run, {"half": "written"})
    run.get_exit_report_path("h", 1).write_text("{}")
    run.clean_up()
    assert list(run.staging.path.iterdir()) == []
    assert not run.get_exit_report_path("h", 1).exists()
    assert read(path) == {"a": "a"}


def test_delete_checkpoint_twice_is_not_an_error(run: RunDirectory) -> None:
    commit(run, stage_files(make_staged(run, {"a": "a", "b/c": "c"})))
    for _ in range(2):
        run.checkpoints.delete("c")
        assert run.checkpoints.list_committed() == []
        assert list(run.staging.path.iterdir()) == []


def test_list_committed_sorts_by_index_and_uses_directory_names(run: RunDirectory) -> None:
    for name, index in (("b", 2), ("a", 10), ("c", 1)):
        commit(run, stage_files(make_staged(run, {"x": name})), name=name, index=index)
    (run.local_path / "b").rename(run.local_path / "renamed")
    (run.local_path / "user directory").mkdir()
    assert [manifest.name for manifest in run.checkpoints.list_committed()] == ["c", "renamed", "a"]
    assert run.checkpoints.list_damaged() == []


def test_list_committed_ignores_staging_area(run: RunDirectory) -> None:
    path = commit(run, stage_files(make_staged(run, {"a": "a"})))
    path.rename(run.staging.path / "deleted-1")
    assert run.checkpoints.list_committed() == []


def remove_file(path: Path) -> None:
    (path / "sub/a").unlink()


def truncate_file(path: Path) -> None:
    os.truncate(path / "sub/a", 3)


def replace_folder_by_file(path: Path) -> None:
    (path / "sub/a").unlink()
    (path / "sub").rmdir()
    (path / "sub").write_text("12345")


def damage_manifest(path: Path) -> None:
    (path / ".drawbar.json").write_text('{"name": "c"')


def binary_manifest(path: Path) -> None:
    (path / ".drawbar.json").write_bytes(b'{"name": "\xff\xfe"}')


def manifest_of_another_kind(path: Path) -> None:
    (path / ".drawbar.json").write_text('{"some": "json"}')


@pytest.mark.parametrize(
    "damage",
    [
        remove_file,
        truncate_file,
        replace_folder_by_file,
        damage_manifest,
        binary_manifest,
        manifest_of_another_kind,
    ],
)
def test_list_intact_excludes_damaged_checkpoint(run: RunDirectory, damage: Any) -> None:
    commit(run, stage_files(make_staged(run, {"a": "a"})), name="checkpoint_000001", index=1)
    damaged = commit(
        run, stage_files(make_staged(run, {"sub/a": "12345"})), name="checkpoint_000002", index=2
    )
    damage(damaged)
    assert [manifest.name for manifest in run.checkpoints.list_intact()] == ["checkpoint_000001"]
    assert run.checkpoints.list_damaged() == [damaged.name]


def test_write_checksums_covers_every_file_of_manifest(run: RunDirectory) -> None:
    path = commit(run, stage_files(make_staged(run, {"a": "a", "b/c": "", METADATA_FILE: "{}"})))
    run.checkpoints.write_checksums("c")
    text = (path / CHECKSUMS_FILE).read_text()
    assert '"a":' in text
    assert '"b/c":' in text
    assert METADATA_FILE not in text
    Checkpoint(path).verify()


def test_write_checksums_of_deleted_checkpoint_does_nothing(run: RunDirectory) -> None:
    commit(run, stage_files(make_staged(run, {"a": "a"})))
    run.checkpoints.delete("c")
    run.checkpoints.write_checksums("c")
    assert run.checkpoints.list_committed() == []


def test_is_staged_is_true_only_for_staging_directories(run: RunDirectory, tmp_path: Path) -> None:
    staged = run.staging.make_directory("rank_0")
    assert run.checkpoints.is_staged(staged)
    assert not run.checkpoints.is_staged(staged / "sub")
    assert not run.checkpoints.is_staged(tmp_path)
    assert run.staging.make_directory("rank_0") != staged


@pytest.mark.parametrize(
    "damage", ["{", '{"version": 1}', "null", '"\\ud800"'], ids=["torn", "fields", "null", "text"]
)
def test_unreadable_manifest_is_none(tmp_path: Path, damage: str) -> None:
    (tmp_path / ".drawbar.json").write_text(damage)
    assert Checkpoint(tmp_path).manifest is None


def test_manifest_round_trips_through_json() -> None:
    original = manifest(loss=float("inf"), name="ü", index=3)
    assert Manifest.decode(original.encode()) == original
    assert original.nbytes == 0


def watch_directory(directory: Path, actions: Sequence[Callable[[], None]]) -> set[tuple[int, str]]:
    """Return the inotify events (mask, name) in a directory while the actions run."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(descriptor, bytes(directory), ENTRY_EVENTS) > 0
    for action in actions:
        action()
    events, data = set(), os.read(descriptor, 65536)
    os.close(descriptor)
    while data:
        _, mask, _, length = struct.unpack_from("iIII", data)
        events.add((mask, data[16 : 16 + length].rstrip(b"\0").decode()))
        data = data[16 + length :]
    return events


def test_files_are_added_to_committed_checkpoint_atomically(run: RunDirectory) -> None:
    offered = stage_files(make_staged(run, {"a": "a"}))
    path = commit(run, offered)
    events = watch_directory(
        path,
        [
            lambda: run.checkpoints.write_checksums("c"),
            lambda: run.checkpoints.write_validation(manifest(offered), durable=True),
            lambda: Checkpoint(path).set_metadata({"by": "ann"}),
        ],
    )
    assert events == {
        (MOVED_IN, CHECKSUMS_FILE),
        (MOVED_IN, VALIDATION_FILE),
        (MOVED_IN, METADATA_FILE),
    }
    assert not list(run.local_path.rglob("*.tmp"))


ESCAPING_PATHS = ["../victim", "a/../../victim", "/etc/passwd", "", "a//b", "./a", "nul\0"]


@pytest.mark.parametrize("path", ESCAPING_PATHS)
def test_manifest_with_escaping_path_is_damaged(run: RunDirectory, path: str) -> None:
    (run.local_path / "victim").write_text("1")
    staged = stage_files(make_staged(run, {"file": "1"}))
    checkpoint_path = commit(run, staged, name="checkpoint_000001")
    text = (checkpoint_path / MANIFEST_FILE).read_text()
    (checkpoint_path / MANIFEST_FILE).write_text(text.replace('"file"', json.dumps(path)))
    assert run.checkpoints.list_intact() == []
    assert run.checkpoints.list_damaged() == ["checkpoint_000001"]
    with pytest.raises(CheckpointError, match="manifest is damaged"):
        Checkpoint(checkpoint_path).verify()


@pytest.mark.parametrize("path", ESCAPING_PATHS)
def test_checksums_with_escaping_path_are_damaged(run: RunDirectory, path: str) -> None:
    checkpoint_path = commit(run, stage_files(make_staged(run, {"a": "a"})))
    (checkpoint_path / CHECKSUMS_FILE).write_text(json.dumps({path: "0" * 16}))
    with pytest.raises(CheckpointError, match=r"checksums\.json cannot be read: .* is not a valid"):
        Checkpoint(checkpoint_path).verify()


@pytest.mark.parametrize("name", ["../victim", "..", "a/../../victim", ""])
def test_journal_with_escaping_name_is_damaged(run: RunDirectory, name: str) -> None:
    event = {"event": "checkpoint_deleted", "time": 1.0, "name": name}
    run.journal_path.write_text(json.dumps(event) + "\n")
    with pytest.raises(DamagedRunError, match=r"Line 1 of .* is not a valid path of a file"):
        RunHistory.read(run)


class FilesystemWithExtraName(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A filesystem that lists one additional name."""

    cachable = False

    def __init__(self, name: str, kind: str) -> None:
        super().__init__(auto_mkdir=True)
        self.more = {"name": name, "type": kind, "size": 1, "mtime": 0.0}

    def ls(self, path: str, detail: bool = False, **options: Any) -> Any:
        extra = {**self.more, "name": f"{path}/{self.more['name']}"}
        return [*super().ls(path, detail, **options), extra]


@pytest.mark.parametrize("name", ["..", "../checkpoint_000009", "a/../.."])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_remote_listing_with_escaping_path_raises(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "run").mkdir()
    directory = resolve_path(tmp_path / "run", FilesystemWithExtraName(name, kind))
    assert isinstance(directory, RemotePath)
    with pytest.raises(CheckpointError, match="is not a valid path of a file"):
        directory.list_files() if kind == "file" else directory.list_directories()


def test_delete_of_linked_checkpoint_keeps_link_target(run: RunDirectory, tmp_path: Path) -> None:
    path = commit(run, stage_files(make_staged(run, {"a": "a"})))
    path.rename(tmp_path / "on another disk")
    path.symlink_to(tmp_path / "on another disk")
    assert [manifest.name for manifest in run.checkpoints.list_intact()] == ["c"]
    run.checkpoints.delete("c")
    assert run.checkpoints.list_committed() == []
    assert list(run.staging.path.iterdir()) == []
    assert read(tmp_path / "on another disk") == {"a": "a"}


def test_list_directories_ignores_temporary_files(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # For example, the validation of the last checkpoint can end together with the attempt.
    staged = make_staged(run, {"a": "a"})
    listings: list[list[Path]] = []
    replace = os.replace

    def list_and_replace(source: Path, target: Path) -> None:
        listings.append(run.staging.list_directories())
        assert source.parent == run.staging.path
        replace(source, target)

    monkeypatch.setattr(os, "replace", list_and_replace)
    write_atomically(run.local_path / "new", b"data", temp_directory=run.staging.path)
    assert listings == [[staged]]
    assert (run.local_path / "new").read_bytes() == b"data"


def test_files_preserved_after_move_to_trash_are_not_deleted(run: RunDirectory) -> None:
    (run.staging.preserved_path / "before").mkdir(parents=True)
    trash = run.staging.move_to_trash(run.staging.preserved_path)
    (run.staging.preserved_path / "after").mkdir(parents=True)
    remove_tree(trash)
    assert [path.name for path in run.staging.preserved_path.iterdir()] == ["after"]
    assert not trash.exists()
