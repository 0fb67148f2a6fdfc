"""The commit protocol on a real folder: a checkpoint is there in full, or it is not there."""

from __future__ import annotations

import ctypes
import json
import os
import struct
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from fsspec.implementations.local import LocalFileSystem

from drawbar.train import Checkpoint, CheckpointError, DamagedRunError, Manifest
from drawbar.train._history.journal import read_events
from drawbar.train._storage import upkeep
from drawbar.train._storage.checkpoint_store import CheckpointDraft
from drawbar.train._storage.contents import (
    CHECKSUMS_FILE,
    MANIFEST_FILE,
    METADATA_FILE,
    VALIDATION_FILE,
    list_files,
)
from drawbar.train._storage.files import remove_tree, write_atomically
from drawbar.train._storage.filesystem import RemotePath, resolve_path
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._storage.staging import StagedFiles, hold_file_lock

MOVED_IN = 0x80  # of inotify
COMES_OR_GOES = 0x40 | MOVED_IN | 0x100 | 0x200  # moved out, moved in, made, deleted


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    directory = RunDirectory(tmp_path / "run")
    upkeep.create_directories(directory)
    return directory


def stage(run: RunDirectory, files: dict[str, str], label: str = "rank_0") -> Path:
    path = run.staging.make_directory(label)
    write(path, files)
    return path


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def read(folder: Path) -> dict[str, str]:
    return {file.path: (folder / file.path).read_text() for file in list_files(folder)}


def part(path: Path, *names: str) -> StagedFiles:
    """All files of a folder, or the share that is named."""
    return StagedFiles(path, tuple(f for f in list_files(path) if not names or f.path in names))


def manifest(*parts: StagedFiles, name: str = "c", index: int = 0, **metrics: Any) -> Manifest:
    described = Manifest(
        name=name,
        index=index,
        attempt=0,
        run_id="ab",
        world_size=len(parts),
        time=time.time(),
        metrics=metrics,
    )
    return described.with_files(file for part in parts for file in part.files)


def commit(
    run: RunDirectory,
    *parts: StagedFiles,
    durable: bool = False,
    metadata: bytes | None = None,
    **fields: Any,
) -> Path:
    draft = CheckpointDraft(
        manifest=manifest(*parts, **fields), staged_files=parts, durable=durable, metadata=metadata
    )
    return run.local_path / run.checkpoints.commit(draft).name


@pytest.mark.parametrize("durable", [False, True])
def test_one_part_becomes_the_checkpoint_without_moving_a_byte(
    run: RunDirectory, durable: bool
) -> None:
    staged = stage(run, {"model.pt": "weights", "deep/er/state": "s"})
    inode = (staged / "model.pt").stat().st_ino
    path = commit(run, part(staged), durable=durable, loss=float("nan"))
    assert read(path) == {"model.pt": "weights", "deep/er/state": "s"}
    assert (path / "model.pt").stat().st_ino == inode
    assert list(run.staging.path.iterdir()) == []
    Checkpoint(path).verify()


def test_the_parts_of_several_ranks_are_merged_by_renames(run: RunDirectory) -> None:
    first = stage(run, {"shard_0": "a", "both": "from 0"})
    second = stage(run, {"shard_1": "b", "both": "from 1", "sub/x": "x"}, label="rank_1")
    inode = (second / "shard_1").stat().st_ino
    path = commit(run, part(first), part(second, "shard_1", "sub/x"))
    assert read(path) == {"shard_0": "a", "both": "from 0", "shard_1": "b", "sub/x": "x"}
    assert (path / "shard_1").stat().st_ino == inode
    assert list(run.staging.path.iterdir()) == []


def test_a_file_that_came_from_another_rank_is_dropped_from_the_first_part(
    run: RunDirectory,
) -> None:
    first = stage(run, {"own": "a", "not in its share": "b"})
    path = commit(run, part(first, "own"))
    assert read(path) == {"own": "a"}


def test_ranks_may_write_into_one_staged_directory(run: RunDirectory) -> None:
    shared = stage(run, {"shard_0": "a", "shard_1": "b"})
    path = commit(run, part(shared, "shard_0"), part(shared, "shard_1"))
    assert read(path) == {"shard_0": "a", "shard_1": "b"}


def test_a_directory_shared_by_all_but_the_first_rank_is_kept_until_both_are_merged(
    run: RunDirectory,
) -> None:
    first, shared = stage(run, {"a": "0"}), stage(run, {"b": "1", "c": "2"}, label="rank_1")
    path = commit(run, part(first), part(shared, "b"), part(shared, "c"))
    assert read(path) == {"a": "0", "b": "1", "c": "2"}
    assert list(run.staging.path.iterdir()) == []


def test_a_checkpoint_may_be_without_files(run: RunDirectory) -> None:
    path = commit(run)
    assert read(path) == {}
    Checkpoint(path).verify()


def test_the_trainers_metadata_is_put_in_unless_the_user_saved_one(run: RunDirectory) -> None:
    plain, own = stage(run, {"a": "a"}), stage(run, {"a": "a", METADATA_FILE: '{"mine": 1}'})
    for name, staged in (("plain", plain), ("own", own)):
        commit(run, part(staged), name=name, metadata=b'{"trainer": 1}')
    assert Checkpoint(run.local_path / "plain").get_metadata() == {"trainer": 1}
    assert Checkpoint(run.local_path / "own").get_metadata() == {"mine": 1}
    Checkpoint(run.local_path / "own").verify()


def test_the_name_of_a_committed_checkpoint_is_refused(run: RunDirectory) -> None:
    commit(run, part(stage(run, {"a": "first"})))
    with pytest.raises(FileExistsError, match="Use a different checkpoint_dir_name"):
        commit(run, part(stage(run, {"a": "second"})))
    assert read(run.local_path / "c") == {"a": "first"}


def test_a_damaged_checkpoint_is_replaced(run: RunDirectory) -> None:
    path = commit(run, part(stage(run, {"a": "first"})))
    (path / "a").unlink()
    commit(run, part(stage(run, {"a": "second"})))
    assert read(path) == {"a": "second"}


@pytest.mark.parametrize("name", ["logs", ".staging", ".workers", "journal.jsonl", "trainer.pkl"])
def test_a_checkpoint_never_takes_the_place_of_the_runs_own_files(
    run: RunDirectory, name: str
) -> None:
    run.journal_path.write_text("events")
    run.trainer_path.write_text("state")
    run.get_log_path(0).write_text("output")
    with pytest.raises(FileExistsError, match=f"/run/{name} exists, but Drawbar did not"):
        commit(run, part(stage(run, {"a": "a"})), name=name)
    assert (run.journal_path.read_text(), run.trainer_path.read_text()) == ("events", "state")
    assert run.get_log_path(0).read_text() == "output"


def test_a_share_that_vanished_is_not_committed(run: RunDirectory) -> None:
    staged = stage(run, {"a": "a", "b": "b"})
    offered = part(staged)
    (staged / "b").unlink()
    with pytest.raises(FileNotFoundError, match="/b'"):
        commit(run, offered)
    assert run.checkpoints.list_committed() == []


def test_a_file_that_grew_after_the_report_is_committed_as_it_is(run: RunDirectory) -> None:
    staged = stage(run, {"events.log": ""})
    offered = part(staged)
    (staged / "events.log").write_text("one more line")
    path = commit(run, offered)
    Checkpoint(path).verify()
    assert read(path) == {"events.log": "one more line"}


def test_links_are_followed_and_empty_folders_left_out(tmp_path: Path) -> None:
    (tmp_path / "far" / "deep").mkdir(parents=True)
    (tmp_path / "far" / "deep" / "model").write_text("m")
    folder = tmp_path / "folder"
    (folder / "empty").mkdir(parents=True)
    (folder / "link").symlink_to(tmp_path / "far")
    (folder / "again").symlink_to("link/deep/model")
    assert read(folder) == {"link/deep/model": "m", "again": "m"}


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda folder: (folder / "a" / "up").symlink_to(folder), "a symbolic link back to"),
        (lambda folder: (folder / "a" / "self").symlink_to("."), "a symbolic link back to"),
        (lambda folder: (folder / "nowhere").symlink_to("gone"), "to gone, which does not exist"),
        (lambda folder: os.mkfifo(folder / "pipe"), "neither a file, nor a directory"),
    ],
)
def test_what_cannot_be_saved_is_told(tmp_path: Path, spoil: Any, told: str) -> None:
    (tmp_path / "a").mkdir()
    spoil(tmp_path)
    with pytest.raises(OSError, match=told):
        list_files(tmp_path)


def test_two_folders_that_lead_into_each_other_are_told(tmp_path: Path) -> None:
    for name, other in (("a", "b"), ("b", "a")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "over").symlink_to(f"../{other}")
    with pytest.raises(OSError, match="a symbolic link back to"):
        list_files(tmp_path)


def test_what_is_not_committed_is_swept(run: RunDirectory) -> None:
    path = commit(run, part(stage(run, {"a": "a"})))
    stage(run, {"half": "written"})
    run.get_exit_report_path("h", 1).write_text("{}")
    upkeep.clean_up(run)
    assert list(run.staging.path.iterdir()) == []
    assert not run.get_exit_report_path("h", 1).exists()
    assert read(path) == {"a": "a"}


def test_a_deleted_checkpoint_is_gone_and_deleting_it_again_is_no_error(run: RunDirectory) -> None:
    commit(run, part(stage(run, {"a": "a", "b/c": "c"})))
    for _ in range(2):
        run.checkpoints.delete("c")
        assert run.checkpoints.list_committed() == []
        assert list(run.staging.path.iterdir()) == []


def test_checkpoints_are_listed_by_index_and_under_the_name_they_have(run: RunDirectory) -> None:
    for name, index in (("b", 2), ("a", 10), ("c", 1)):
        commit(run, part(stage(run, {"x": name})), name=name, index=index)
    (run.local_path / "b").rename(run.local_path / "renamed")
    (run.local_path / "the user's folder").mkdir()
    assert [each.name for each in run.checkpoints.list_committed()] == ["c", "renamed", "a"]
    assert run.checkpoints.list_damaged() == []


def test_nothing_in_staging_is_a_checkpoint(run: RunDirectory) -> None:
    path = commit(run, part(stage(run, {"a": "a"})))
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
def test_a_damaged_checkpoint_is_told_from_an_intact_one(run: RunDirectory, damage: Any) -> None:
    commit(run, part(stage(run, {"a": "a"})), name="checkpoint_000001", index=1)
    hurt = commit(run, part(stage(run, {"sub/a": "12345"})), name="checkpoint_000002", index=2)
    damage(hurt)
    assert [each.name for each in run.checkpoints.list_intact()] == ["checkpoint_000001"]
    assert run.checkpoints.list_damaged() == [hurt.name]


def test_checksums_are_written_for_every_file_of_the_manifest(run: RunDirectory) -> None:
    path = commit(run, part(stage(run, {"a": "a", "b/c": "", METADATA_FILE: "{}"})))
    run.checkpoints.write_checksums("c")
    text = (path / CHECKSUMS_FILE).read_text()
    assert '"a":' in text
    assert '"b/c":' in text
    assert METADATA_FILE not in text
    Checkpoint(path).verify()


def test_checksums_of_a_deleted_checkpoint_are_no_error(run: RunDirectory) -> None:
    commit(run, part(stage(run, {"a": "a"})))
    run.checkpoints.delete("c")
    run.checkpoints.write_checksums("c")
    assert run.checkpoints.list_committed() == []


def test_a_stage_lies_where_committing_moves_no_byte(run: RunDirectory, tmp_path: Path) -> None:
    staged = run.staging.make_directory("rank_0")
    assert run.checkpoints.is_staged(staged)
    assert not run.checkpoints.is_staged(staged / "sub")
    assert not run.checkpoints.is_staged(tmp_path)
    assert run.staging.make_directory("rank_0") != staged


@pytest.mark.parametrize(
    "damage", ["{", '{"version": 1}', "null", '"\\ud800"'], ids=["torn", "fields", "null", "text"]
)
def test_a_manifest_that_cannot_be_read_is_none(tmp_path: Path, damage: str) -> None:
    (tmp_path / ".drawbar.json").write_text(damage)
    assert Checkpoint(tmp_path).manifest is None


def test_a_manifest_comes_back_as_it_was_written() -> None:
    original = manifest(loss=float("inf"), name="ü", index=3)
    assert Manifest.decode(original.encode()) == original
    assert original.nbytes == 0


def what_happens_in(folder: Path, actions: Sequence[Callable[[], None]]) -> set[tuple[int, str]]:
    """Do something while inotify watches a folder; give what came and went, as (how, name)."""
    libc = ctypes.CDLL(None, use_errno=True)
    descriptor = libc.inotify_init1(os.O_NONBLOCK)
    assert libc.inotify_add_watch(descriptor, bytes(folder), COMES_OR_GOES) > 0
    for action in actions:
        action()
    found, data = set(), os.read(descriptor, 65536)
    os.close(descriptor)
    while data:
        _, how, _, length = struct.unpack_from("iIII", data)
        found.add((how, data[16 : 16 + length].rstrip(b"\0").decode()))
        data = data[16 + length :]
    return found


def test_what_is_added_to_a_committed_checkpoint_is_made_elsewhere(run: RunDirectory) -> None:
    offered = part(stage(run, {"a": "a"}))
    path = commit(run, offered)
    happened = what_happens_in(
        path,
        [
            lambda: run.checkpoints.write_checksums("c"),
            lambda: run.checkpoints.write_validation(manifest(offered), durable=True),
            lambda: Checkpoint(path).set_metadata({"by": "ann"}),
        ],
    )
    assert happened == {
        (MOVED_IN, CHECKSUMS_FILE),
        (MOVED_IN, VALIDATION_FILE),
        (MOVED_IN, METADATA_FILE),
    }
    assert not list(run.local_path.rglob("*.tmp"))


def test_a_link_that_another_rank_is_replacing_is_looked_at_again(run: RunDirectory) -> None:
    folder = run.staging.make_directory("rank_0") / "folder"
    folder.symlink_to("nowhere")
    lock, held = run.staging.path / "links.lock", threading.Event()

    def replace() -> None:
        with hold_file_lock(lock):
            held.set()
            while not is_waited_for(lock):
                pass
            folder.unlink()
            folder.mkdir()
            (folder / "x").write_text("1")

    other = threading.Thread(target=replace, daemon=True)
    other.start()
    held.wait()
    assert [file.path for file in run.staging.scan_directory(folder.parent).files] == ["folder/x"]
    other.join()


def is_waited_for(lock: Path) -> bool:
    inode = f":{lock.stat().st_ino} "
    lines = Path("/proc/locks").read_text().splitlines()
    return any("->" in line and inode in line for line in lines)


LEAD_OUT = ["../victim", "a/../../victim", "/etc/passwd", "", "a//b", "./a", "nul\0"]


@pytest.mark.parametrize("path", LEAD_OUT)
def test_a_manifest_that_names_what_lies_elsewhere_is_damage(run: RunDirectory, path: str) -> None:
    (run.local_path / "victim").write_text("1")
    place = commit(run, part(stage(run, {"file": "1"})), name="checkpoint_000001")
    text = (place / MANIFEST_FILE).read_text()
    (place / MANIFEST_FILE).write_text(text.replace('"file"', json.dumps(path)))
    assert run.checkpoints.list_intact() == []
    assert run.checkpoints.list_damaged() == ["checkpoint_000001"]
    with pytest.raises(CheckpointError, match="manifest is damaged"):
        Checkpoint(place).verify()


@pytest.mark.parametrize("path", LEAD_OUT)
def test_checksums_of_what_lies_elsewhere_are_damage(run: RunDirectory, path: str) -> None:
    place = commit(run, part(stage(run, {"a": "a"})))
    (place / CHECKSUMS_FILE).write_text(json.dumps({path: "0" * 16}))
    with pytest.raises(CheckpointError, match=r"checksums\.json cannot be read: .* is not a valid"):
        Checkpoint(place).verify()


@pytest.mark.parametrize("name", ["../victim", "..", "a/../../victim", ""])
def test_a_journal_that_names_what_lies_elsewhere_is_damaged(run: RunDirectory, name: str) -> None:
    event = {"event": "checkpoint_deleted", "time": 1.0, "name": name}
    run.journal_path.write_text(json.dumps(event) + "\n")
    with pytest.raises(DamagedRunError, match=r"Line 1 of .* is not a valid path of a file"):
        read_events(run)


class Lying(LocalFileSystem):  # type: ignore[misc]  # fsspec has no types
    """A filesystem that lists one more name."""

    cachable = False

    def __init__(self, name: str, kind: str) -> None:
        super().__init__(auto_mkdir=True)
        self.more = {"name": name, "type": kind, "size": 1, "mtime": 0.0}

    def find(self, path: str, *args: Any, **options: Any) -> Any:
        found = super().find(path, *args, **options)
        return {**found, f"{path}/{self.more['name']}": self.more}


@pytest.mark.parametrize("name", ["..", "../checkpoint_000009", "a/../.."])
@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_listing_of_what_lies_elsewhere_is_damage(tmp_path: Path, name: str, kind: str) -> None:
    (tmp_path / "run").mkdir()
    folder = resolve_path(tmp_path / "run", Lying(name, kind))
    assert isinstance(folder, RemotePath)
    with pytest.raises(CheckpointError, match="is not a valid path of a file"):
        folder.list_files() if kind == "file" else folder.list_directories()


def test_what_a_link_leads_to_is_not_deleted_with_the_link(
    run: RunDirectory, tmp_path: Path
) -> None:
    path = commit(run, part(stage(run, {"a": "a"})))
    path.rename(tmp_path / "on another disk")
    path.symlink_to(tmp_path / "on another disk")
    assert [each.name for each in run.checkpoints.list_intact()] == ["c"]
    run.checkpoints.delete("c")
    assert run.checkpoints.list_committed() == []
    assert list(run.staging.path.iterdir()) == []
    assert read(tmp_path / "on another disk") == {"a": "a"}


def test_an_attempt_that_ends_leaves_alone_what_is_on_its_way_into_a_checkpoint(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As where the validation of the last checkpoint ends together with the attempt.
    staged = stage(run, {"a": "a"})
    seen: list[list[Path]] = []
    replace = os.replace

    def looked(source: Path, target: Path) -> None:
        seen.append(run.staging.list_directories())
        assert source.parent == run.staging.path
        replace(source, target)

    monkeypatch.setattr(os, "replace", looked)
    write_atomically(run.local_path / "new", b"data", temp_directory=run.staging.path)
    assert seen == [[staged]]
    assert (run.local_path / "new").read_bytes() == b"data"


def test_what_is_set_aside_after_a_commit_is_not_deleted_for_it(run: RunDirectory) -> None:
    (run.staging.preserved_path / "before").mkdir(parents=True)
    grave = run.staging.move_to_trash(run.staging.preserved_path)
    (run.staging.preserved_path / "after").mkdir(parents=True)
    remove_tree(grave)
    assert [path.name for path in run.staging.preserved_path.iterdir()] == ["after"]
    assert not grave.exists()
