"""A checkpoint is a directory: open it, copy it, describe it, and find out whether it is whole."""

from __future__ import annotations

import os
import pickle
import shutil
import time
from pathlib import Path
from typing import Any, cast

import cloudpickle
import pytest

from drawbar.train import Checkpoint, CheckpointError
from drawbar.train._storage import upkeep
from drawbar.train._storage.checkpoint_store import CheckpointDraft
from drawbar.train._storage.contents import list_files
from drawbar.train._storage.manifest import Manifest
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._storage.staging import StagedFiles


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    """A committed one, with checksums."""
    run = RunDirectory(tmp_path / "run")
    upkeep.create_directories(run)
    staged = run.staging.make_directory("rank_0")
    (staged / "deep").mkdir()
    (staged / "model.pt").write_text("weights")
    (staged / "deep" / "state").write_text("state")
    parts = [StagedFiles(staged, list_files(staged))]
    described = Manifest(
        name="c",
        index=4,
        attempt=1,
        run_id="ab",
        world_size=2,
        time=time.time(),
        metrics={"loss": 0.5},
    ).with_files(parts[0].files)
    run.checkpoints.commit(CheckpointDraft(manifest=described, staged_files=parts, durable=False))
    run.checkpoints.write_checksums("c")
    return run.checkpoints.get_checkpoint("c")


def files_in(path: str | os.PathLike[str]) -> dict[str, str]:
    return {file.path: (Path(path) / file.path).read_text() for file in list_files(Path(path))}


CONTENT = {"model.pt": "weights", "deep/state": "state"}


@pytest.mark.parametrize("kind", [str, Path, Checkpoint])
def test_a_checkpoint_is_made_of_anything_that_has_a_path(tmp_path: Path, kind: Any) -> None:
    for made in (Checkpoint(kind(tmp_path)), Checkpoint.from_directory(kind(tmp_path))):
        assert made.path == os.fspath(made) == str(tmp_path)


@pytest.mark.parametrize("path", [None, 5, b"/tmp", {"a": 1}])
def test_what_is_no_path_is_told(path: Any) -> None:
    with pytest.raises(TypeError, match="must be the path or URI of a directory"):
        Checkpoint(path)


def test_an_empty_path_is_not_the_current_folder() -> None:
    with pytest.raises(ValueError, match="path"):
        Checkpoint("")


def test_a_path_is_made_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/ann")
    assert Checkpoint("a/b").path == str(tmp_path / "a" / "b")
    assert Checkpoint("~/c").path == "/home/ann/c"


def test_checkpoints_at_the_same_place_are_equal(tmp_path: Path) -> None:
    one, same = Checkpoint(tmp_path), Checkpoint(f"{tmp_path}/")
    assert one == same
    assert len({one, same}) == 1
    assert one != Checkpoint(tmp_path / "other")
    assert one != str(tmp_path)
    assert repr(one) == f"Checkpoint({str(tmp_path)!r})"


def test_a_checkpoint_pickles(checkpoint: Checkpoint) -> None:
    for module in (pickle, cloudpickle):
        assert module.loads(module.dumps(checkpoint)) == checkpoint


def test_a_framework_opens_it_as_a_path(checkpoint: Checkpoint) -> None:
    with open(Path(checkpoint) / "model.pt") as file:
        assert file.read() == "weights"
    assert sorted(os.listdir(checkpoint))[-2:] == ["deep", "model.pt"]


def test_as_directory_gives_the_directory_itself(checkpoint: Checkpoint) -> None:
    with checkpoint.as_directory() as path:
        assert path == checkpoint.path
        assert files_in(path) == CONTENT
    checkpoint.verify()


def test_to_directory_copies_the_users_files_alone(checkpoint: Checkpoint, tmp_path: Path) -> None:
    target = tmp_path / "new" / "folder"
    assert checkpoint.to_directory(target) == str(target)
    assert files_in(target) == CONTENT
    assert sorted(os.listdir(target)) == ["deep", "model.pt"]


def test_a_copy_leaves_out_what_is_being_written(checkpoint: Checkpoint, tmp_path: Path) -> None:
    (Path(checkpoint) / ".drawbar-metadata.json.7.tmp").write_text("half")
    checkpoint.to_directory(tmp_path / "copy")
    assert files_in(tmp_path / "copy") == CONTENT


def test_to_directory_makes_one_copy_for_all_that_were_given_it(checkpoint: Checkpoint) -> None:
    first = checkpoint.to_directory()
    assert files_in(first) == CONTENT
    assert pickle.loads(pickle.dumps(checkpoint)).to_directory() == first
    assert Checkpoint(checkpoint).to_directory() != first
    shutil.rmtree(first)
    assert checkpoint.to_directory() == first
    assert files_in(first) == CONTENT


def test_to_directory_replaces_files_of_an_earlier_copy(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    (tmp_path / "model.pt").write_text("something much longer than the weights")
    (tmp_path / "mine").write_text("stays")
    checkpoint.to_directory(tmp_path)
    assert (tmp_path / "model.pt").read_text() == "weights"
    assert (tmp_path / "mine").read_text() == "stays"


def test_copying_a_checkpoint_onto_itself_does_not_harm_it(checkpoint: Checkpoint) -> None:
    with pytest.raises(ValueError, match=r"to_directory\(path=.*\) is the checkpoint itself"):
        checkpoint.to_directory(checkpoint.path)
    checkpoint.verify()


def enter(checkpoint: Checkpoint) -> None:
    with checkpoint.as_directory():
        pass


@pytest.mark.parametrize("use", [enter, Checkpoint.to_directory, Checkpoint.verify])
def test_a_checkpoint_that_is_not_there_is_told(tmp_path: Path, use: Any) -> None:
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


def test_metadata_that_is_no_json_leaves_the_old(checkpoint: Checkpoint) -> None:
    checkpoint.set_metadata({"a": 1})
    with pytest.raises(TypeError, match="not JSON serializable"):
        checkpoint.set_metadata({"a": object()})
    assert checkpoint.get_metadata() == {"a": 1}


def test_metadata_that_is_no_mapping_is_refused(checkpoint: Checkpoint) -> None:
    with pytest.raises(TypeError, match=r"metadata must be a mapping, not 3 \(int\)"):
        checkpoint.set_metadata(cast(Any, 3))


def test_the_manifest_tells_what_was_committed(checkpoint: Checkpoint, tmp_path: Path) -> None:
    manifest = checkpoint.manifest
    assert manifest is not None
    assert [(file.path, file.size) for file in manifest.files] == [
        ("deep/state", 5),
        ("model.pt", 7),
    ]
    assert (manifest.nbytes, manifest.index, manifest.metrics) == (12, 4, {"loss": 0.5})
    assert Checkpoint(tmp_path).manifest is None


def remove(path: Path) -> None:
    (path / "deep" / "state").unlink()


def truncate(path: Path) -> None:
    os.truncate(path / "model.pt", 3)


def lengthen(path: Path) -> None:
    (path / "model.pt").write_text("weights!")


def alter(path: Path) -> None:
    (path / "model.pt").write_text("weighty")


def drop_manifest(path: Path) -> None:
    (path / ".drawbar.json").unlink()


def damage_checksums(path: Path) -> None:
    (path / ".drawbar-checksums.json").write_text("{")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, "deep/state is missing"),
        (truncate, "model.pt has 3 bytes, but the commit has 7"),
        (lengthen, "model.pt has 8 bytes, but the commit has 7"),
        (
            alter,
            r"model.pt was changed after the commit: its xxh3 is \w{16}, but the commit has \w{16}",
        ),
        (drop_manifest, r"has no readable manifest \(.drawbar.json\). It was never committed"),
        (damage_checksums, ".drawbar-checksums.json cannot be read"),
    ],
)
def test_verify_names_the_file_that_is_not_as_committed(
    checkpoint: Checkpoint, damage: Any, message: str
) -> None:
    damage(Path(checkpoint))
    with pytest.raises(CheckpointError, match=message):
        checkpoint.verify()


def test_without_checksums_verify_goes_by_size(checkpoint: Checkpoint) -> None:
    (Path(checkpoint) / ".drawbar-checksums.json").unlink()
    alter(Path(checkpoint))
    checkpoint.verify()
    truncate(Path(checkpoint))
    with pytest.raises(CheckpointError, match="has 3 bytes"):
        checkpoint.verify()


def test_files_that_the_user_added_later_do_not_matter(checkpoint: Checkpoint) -> None:
    (Path(checkpoint) / "evaluation.txt").write_text("good")
    checkpoint.verify()
