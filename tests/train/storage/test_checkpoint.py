"""Tests of drawbar.train.Checkpoint: open, copy, describe, and verify a checkpoint directory."""

from __future__ import annotations

import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any, cast

import cloudpickle
import pytest

from drawbar import train
from drawbar.train import Checkpoint, CheckpointError
from tests.train.runs import fit
from tests.train.storage.user_directories import content as files_in


def save_second_report() -> None:
    train.report({"loss": 1.0})
    with train.checkpoint_dir() as path:
        (path / "deep").mkdir()
        (path / "model.pt").write_text("weights")
        (path / "deep" / "state").write_text("state")
        train.report({"loss": 0.5}, checkpoint=path)


@pytest.fixture(scope="module")
def committed(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """Return a committed checkpoint with checksums."""
    checkpoint = fit(save_second_report, tmp_path_factory.mktemp("storage")).checkpoint
    assert checkpoint is not None
    assert ".drawbar-checksums.json" in os.listdir(checkpoint)
    return checkpoint


@pytest.fixture
def checkpoint(committed: Checkpoint, tmp_path: Path) -> Checkpoint:
    """Return a copy of the committed checkpoint, which the test may change."""
    return Checkpoint(shutil.copytree(committed, tmp_path / "run" / "checkpoint"))


CONTENT = {"model.pt": "weights", "deep/state": "state"}


@pytest.mark.parametrize("path_type", [str, Path, Checkpoint])
def test_checkpoint_accepts_any_path_type(tmp_path: Path, path_type: Any) -> None:
    for checkpoint in (
        Checkpoint(path_type(tmp_path)),
        Checkpoint.from_directory(path_type(tmp_path)),
    ):
        assert checkpoint.path == os.fspath(checkpoint) == str(tmp_path)


@pytest.mark.parametrize("path", [None, 5, b"/tmp", {"a": 1}])
def test_checkpoint_of_non_path_raises_type_error(path: Any) -> None:
    with pytest.raises(
        TypeError, match=re.escape(f"Checkpoint(path={path!r}) must be the path or URI of")
    ):
        Checkpoint(path)


def test_checkpoint_of_empty_path_raises() -> None:
    with pytest.raises(ValueError, match="path"):
        Checkpoint("")


def test_checkpoint_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ann")
    assert Checkpoint("a/b").path == str(tmp_path / "a" / "b")
    assert Checkpoint("~/c").path == "/home/ann/c"


def test_checkpoints_with_same_path_are_equal(tmp_path: Path) -> None:
    checkpoint, same = Checkpoint(tmp_path), Checkpoint(f"{tmp_path}/")
    assert checkpoint == same
    assert len({checkpoint, same}) == 1
    assert checkpoint != Checkpoint(tmp_path / "other")
    assert checkpoint != str(tmp_path)
    assert repr(checkpoint) == f"Checkpoint({str(tmp_path)!r})"


def test_checkpoint_can_be_pickled(checkpoint: Checkpoint) -> None:
    for module in (pickle, cloudpickle):
        assert module.loads(module.dumps(checkpoint)) == checkpoint


def test_checkpoint_opens_as_path(checkpoint: Checkpoint) -> None:
    with open(Path(checkpoint) / "model.pt") as file:
        assert file.read() == "weights"
    assert sorted(os.listdir(checkpoint))[-2:] == ["deep", "model.pt"]


def test_as_directory_of_local_checkpoint_does_not_copy(checkpoint: Checkpoint) -> None:
    with checkpoint.as_directory() as path:
        assert path == checkpoint.path
        assert files_in(path) == CONTENT
    checkpoint.verify()


def test_to_directory_copies_only_user_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder"
    assert checkpoint.to_directory(target) == str(target)
    assert files_in(target) == CONTENT
    assert sorted(os.listdir(target)) == ["deep", "model.pt"]


def test_to_directory_skips_temporary_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (Path(checkpoint) / ".drawbar-metadata.json.7.tmp").write_text("half")
    checkpoint.to_directory(tmp_path / "copy")
    assert files_in(tmp_path / "copy") == CONTENT


def test_to_directory_without_path_shares_copy_of_same_object(checkpoint: Checkpoint) -> None:
    first = checkpoint.to_directory()
    assert files_in(first) == CONTENT
    assert pickle.loads(pickle.dumps(checkpoint)).to_directory() == first
    assert Checkpoint(checkpoint).to_directory() != first
    shutil.rmtree(first)
    assert checkpoint.to_directory() == first
    assert files_in(first) == CONTENT


def test_to_directory_replaces_existing_files(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_text("something much longer than the weights")
    (tmp_path / "mine").write_text("stays")
    checkpoint.to_directory(tmp_path)
    assert (tmp_path / "model.pt").read_text() == "weights"
    assert (tmp_path / "mine").read_text() == "stays"


def test_to_directory_onto_itself_raises_and_keeps_files(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match=r"to_directory\(path=.*\) is the checkpoint itself"):
        checkpoint.to_directory(checkpoint.path)
    checkpoint.verify()


def open_as_directory(checkpoint: Checkpoint) -> None:
    with checkpoint.as_directory():
        pass


@pytest.mark.parametrize("use", [open_as_directory, Checkpoint.to_directory, Checkpoint.verify])
def test_missing_checkpoint_raises_checkpoint_error(tmp_path: Path, use: Any) -> None:
    missing = Checkpoint(tmp_path / "none")
    with pytest.raises(CheckpointError, match=f"Checkpoint {missing.path} does not exist"):
        use(missing)


def test_metadata_is_set_updated_and_copied(checkpoint: Checkpoint, tmp_path: Path) -> None:
    assert checkpoint.get_metadata() == {}
    checkpoint.set_metadata({"a": 1, "b": [2]})
    checkpoint.update_metadata({"b": 3, "c": None})
    assert checkpoint.get_metadata() == {"a": 1, "b": 3, "c": None}
    checkpoint.set_metadata({"only": "this"})
    copied = Checkpoint(checkpoint.to_directory(tmp_path / "copy"))
    assert copied.get_metadata() == {"only": "this"}
    checkpoint.verify()


def test_set_metadata_with_non_json_value_keeps_old_metadata(checkpoint: Checkpoint) -> None:
    checkpoint.set_metadata({"a": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoint.set_metadata({"a": object()})
    assert checkpoint.get_metadata() == {"a": 1}


def test_set_metadata_with_non_mapping_raises_type_error(checkpoint: Checkpoint) -> None:
    with pytest.raises(TypeError, match=r"metadata must be a mapping, not 3 \(int\)"):
        checkpoint.set_metadata(cast(Any, 3))


def test_manifest_lists_committed_files_and_metrics(checkpoint: Checkpoint, tmp_path: Path) -> None:
    manifest = checkpoint.manifest
    assert manifest is not None
    assert [(file.path, file.size) for file in manifest.files] == [
        ("deep/state", 5),
        ("model.pt", 7),
    ]
    assert (manifest.nbytes, manifest.index, manifest.metrics) == (12, 1, {"loss": 0.5})
    assert Checkpoint(tmp_path).manifest is None


def remove(path: Path) -> None:
    (path / "deep" / "state").unlink()


def truncate(path: Path) -> None:
    os.truncate(path / "model.pt", 3)


def lengthen(path: Path) -> None:
    (path / "model.pt").write_text("weights!")


def change(path: Path) -> None:
    (path / "model.pt").write_text("weighty")


def drop_manifest(path: Path) -> None:
    (path / ".drawbar.json").unlink()


def damage_checksums(path: Path) -> None:
    (path / ".drawbar-checksums.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, "deep/state is missing"),
        (truncate, "model.pt has 3 bytes, but had 7 bytes at the commit"),
        (lengthen, "model.pt has 8 bytes, but had 7 bytes at the commit"),
        (
            change,
            r"changed after the commit: its xxh3 checksum is \w{16}, but was \w{16} at the commit",
        ),
        (drop_manifest, r"has no readable manifest \(.drawbar.json\). It was never committed"),
        (damage_checksums, ".drawbar-checksums.json cannot be read"),
    ],
)
def test_verify_of_damaged_checkpoint_names_the_file(
    checkpoint: Checkpoint, damage: Any, message: str
) -> None:
    damage(Path(checkpoint))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.verify()


def test_verify_without_checksums_compares_sizes(checkpoint: Checkpoint) -> None:
    (Path(checkpoint) / ".drawbar-checksums.json").unlink()
    change(Path(checkpoint))
    checkpoint.verify()
    truncate(Path(checkpoint))
    with pytest.raises(CheckpointError, match="has 3 bytes"):
        checkpoint.verify()


def test_verify_ignores_files_added_after_commit(checkpoint: Checkpoint) -> None:
    (Path(checkpoint) / "evaluation.txt").write_text("good")
    checkpoint.verify()
