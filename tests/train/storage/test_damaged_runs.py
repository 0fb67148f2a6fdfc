"""Tests of runs whose directory is damaged: errors, resume, and recovery of intact checkpoints."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drawbar import train
from drawbar._records.events import JOURNAL_FORMAT
from drawbar.train import (
    CheckpointUploadMode,
    ControllerError,
    DamagedRunError,
    DataParallelTrainer,
    FailureConfig,
    Result,
    ResumeError,
    UnsupportedFormatError,
    WorkerGroupError,
)
from drawbar.train.runs import find_run
from drawbar.train.testing import check_run
from tests.train.runs import fit
from tests.train.text_checkpoints import ASYNC, content, save


def two_steps() -> int:
    for text in "ab":
        save(text)
    return train.get_context().get_attempt()


def empty(run: Path) -> None:
    (run / "journal.jsonl").write_bytes(b"")


def delete(run: Path) -> None:
    (run / "journal.jsonl").unlink()


def tear(run: Path) -> None:
    os.truncate(run / "journal.jsonl", 20)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    fit(two_steps, tmp_path)
    return tmp_path / "run"


LOSSES = pytest.mark.parametrize("lose", [empty, delete, tear])


@LOSSES
@pytest.mark.parametrize("resume", ["auto", "must"])
def test_resume_without_journal_starts_from_newest_checkpoint(
    run: Path, lose: Callable[[Path], None], resume: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    run_id = train.Checkpoint(run / "checkpoint_000001").manifest.run_id  # type: ignore[union-attr]
    lose(run)

    def function() -> Any:
        started_from = content(train.get_checkpoint())
        save("c")
        return started_from, train.get_context().get_run_id(), train.get_context().get_attempt()

    result = fit(function, run.parent, resume=resume)
    assert result.return_value == ("b", run_id, 1)
    assert sorted(path.name for path in run.glob("checkpoint_*")) == [
        f"checkpoint_00000{index}" for index in range(3)
    ]
    assert "its journal, which is empty or missing" in capfd.readouterr().err
    check_run(run)


@LOSSES
def test_resume_never_with_lost_journal_raises(run: Path, lose: Callable[[Path], None]) -> None:
    lose(run)
    with pytest.raises(ResumeError, match="contains a run with damaged parts"):
        fit(two_steps, run.parent, resume="never")


@LOSSES
@pytest.mark.parametrize("read", [Result.from_path, train.attach])
def test_result_of_run_without_journal_raises_damaged_run_error(
    run: Path, lose: Callable[[Path], None], read: Callable[[Path], Any]
) -> None:
    lose(run)
    with pytest.raises(
        DamagedRunError, match=r"journal\.jsonl is empty or missing, although checkpoint_0"
    ):
        read(run)
    assert DataParallelTrainer.restore(run).fit().return_value == 1


def set_newer_format(path: Path) -> bytes:
    """Set a newer format version, and change a field as only a new format may."""
    newer = re.sub(rb'"format_version": ?\d\b', b'"format_version":9', path.read_bytes())
    newer = newer.replace(b'"name":', b'"title":', 1)
    assert b'"format_version":9' in newer
    path.write_bytes(newer)
    return newer


def test_journal_of_newer_format_raises_and_is_not_changed(run: Path) -> None:
    journal = run / "journal.jsonl"
    newer = set_newer_format(journal)
    expected = (
        f"{journal} has format version 9, but this version of Drawbar supports format version "
        f"{JOURNAL_FORMAT}. Upgrade Drawbar"
    )
    for use in (
        lambda: Result.from_path(run),
        lambda: train.attach(run),
        lambda: fit(two_steps, run.parent),
        lambda: DataParallelTrainer.restore(run).fit(),
    ):
        with pytest.raises(UnsupportedFormatError, match=re.escape(expected)):
            use()
    assert expected in find_run(run).damage
    assert journal.read_bytes() == newer
    assert not (run / "journal.damaged").exists()


def test_manifest_of_newer_format_raises_and_is_not_changed(run: Path) -> None:
    manifest = run / "checkpoint_000001" / ".drawbar.json"
    newer = set_newer_format(manifest)
    message = f"{manifest} has format version 9, but .* version 1"
    for use in (
        lambda: fit(two_steps, run.parent),
        lambda: Result.from_path(run),
        lambda: train.Checkpoint(manifest.parent).verify(),
    ):
        with pytest.raises(UnsupportedFormatError, match=message):
            use()
    record = find_run(run)
    manifests, errors = record.inspect_checkpoints()
    assert [checkpoint.name for checkpoint in manifests] == ["checkpoint_000000"]
    assert record.list_checkpoints() == manifests
    assert list(errors) == ["checkpoint_000001"]
    assert re.match(message, errors["checkpoint_000001"])
    assert re.match(message, dict(record.verify_checkpoints())["checkpoint_000001"])
    assert manifest.read_bytes() == newer
    assert not (run / "broken").exists()


def test_journal_with_unknown_settings_ignores_them(run: Path) -> None:
    first, *rest = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    started = json.loads(first)
    for value in ({"num_to_keep": 1, "by_size": True}, {"num_to_keep": "many"}, "all of them"):
        started["config"]["checkpoint_config"] = value
        (run / "journal.jsonl").write_text(json.dumps(started) + "\n" + "".join(rest))
        assert len(Result.from_path(run).best_checkpoints) == 2
        assert len(train.attach(run).wait().best_checkpoints) == 2
    assert fit(two_steps, run.parent).return_value == 1


@pytest.mark.parametrize("damage", [b"", b"\x80\x04garbage", b"\x80\x04K\x01.", b"cgone\nf\n."])
def test_restore_of_damaged_trainer_pickle_names_the_file(run: Path, damage: bytes) -> None:
    (run / "trainer.pkl").write_bytes(damage)
    with pytest.raises(DamagedRunError, match=f"^{run}/trainer.pkl cannot be unpickled here: "):
        DataParallelTrainer.restore(run)


NESTED = b'{"event":"checkpoint","metrics":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
"""JSON that is nested too deeply to decode."""


def test_too_deeply_nested_json_is_damage(run: Path) -> None:
    with open(run / "journal.jsonl", "ab") as journal:
        journal.write(NESTED + b"\n")
    (run / "checkpoint_000001" / ".drawbar.json").write_bytes(NESTED)
    with pytest.raises(DamagedRunError, match=r"Line \d+ of .* cannot be read"):
        Result.from_path(run)
    result = fit(two_steps, run.parent)
    assert content(result.checkpoint) == "b"
    assert (run / "journal.damaged").exists()


def test_result_of_journal_without_some_lines_is_read_or_damaged(run: Path) -> None:
    lines = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    (start,) = [line for line in lines if b'"event":"attempt_started"' in line]
    (newest,) = [line for line in lines if b'"index":1,' in line]  # commit of the second report
    for number in range(len(lines)):
        for remaining in (
            lines[:number] + lines[number + 1 :],
            lines[number:],
            lines[: number + 1],
        ):
            (run / "journal.jsonl").write_bytes(b"".join(remaining))
            if start not in remaining and newest not in remaining:
                message = (
                    r"run, reports \d to 1 are missing, although checkpoint_00000\d was committed"
                )
                with pytest.raises(DamagedRunError, match=message):
                    Result.from_path(run)
                continue
            result = Result.from_path(run)
            assert content(result.checkpoint) == "b"
            assert len(result.timeline.attempts) <= 1


def test_result_of_run_with_copied_checkpoint_of_another_run_is_read(
    run: Path, tmp_path: Path
) -> None:
    def six_steps() -> None:
        for text in "abcdef":
            save(text)

    fit(six_steps, tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "run" / "checkpoint_000005", run / "pretrained")
    assert Result.from_path(run).error is None


def truncate(file: Path) -> None:
    os.truncate(file, 0)


def change(file: Path) -> None:
    file.write_text("?")


DAMAGES = pytest.mark.parametrize("damage", [truncate, Path.unlink, change])


@DAMAGES
def test_resume_skips_damaged_checkpoint(
    run: Path, damage: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    damage(run / "checkpoint_000001" / "model")

    def function() -> str:
        started_from = content(train.get_checkpoint())
        save("c")
        return started_from

    result = fit(function, run.parent, resume="must")
    assert result.return_value == "a"
    assert content(result.checkpoint) == "c"
    assert result.metrics_dataframe["index"].tolist() == [0, 1]
    assert re.search(r"has damaged parts: \S*checkpoint_000001", capfd.readouterr().err)
    check_run(run)


def test_changed_checkpoint_is_quarantined(run: Path) -> None:
    change(run / "checkpoint_000001" / "model")
    fit(two_steps, run.parent)
    (quarantined,) = (run / "broken").iterdir()
    assert (quarantined / "model").read_text() == "?"


def test_checkpoint_without_files_of_drawbar_is_quarantined(run: Path) -> None:
    newest = run / "checkpoint_000001"
    for path in newest.glob(".drawbar*"):
        path.unlink()
    fit(two_steps, run.parent)
    (quarantined,) = (run / "broken").iterdir()
    assert (quarantined / "model").read_text() == "b"
    assert content(train.Checkpoint(newest)) == "a"
    check_run(run)


def test_resume_must_without_intact_checkpoint_raises(run: Path) -> None:
    for checkpoint in run.glob("checkpoint_*"):
        change(checkpoint / "model")
    with pytest.raises(ResumeError, match="has no intact checkpoint"):
        fit(two_steps, run.parent, resume="must")
    assert not (run / "broken").exists()


@DAMAGES
def test_restart_skips_damaged_checkpoint(
    tmp_path: Path, damage: Callable[[Path], None], capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> str:
        if train.get_context().get_attempt() == 1:
            return content(train.get_checkpoint())
        two_steps()
        newest = tmp_path / "run" / "checkpoint_000001"
        while not (newest / ".drawbar-checksums.json").exists():
            os.sched_yield()
        damage(newest / "model")
        raise ValueError("on purpose")

    once_more = FailureConfig(max_failures=1)
    assert fit(function, tmp_path, failure_config=once_more).return_value == "a"
    assert "Skipped damaged checkpoint " in capfd.readouterr().err
    check_run(tmp_path / "run")


def test_restart_that_cannot_move_damaged_checkpoint_names_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def function() -> None:
        two_steps()
        (tmp_path / "run" / "broken").touch()
        (tmp_path / "run" / "checkpoint_000001" / "model").write_text("")
        raise ValueError("on purpose")

    with pytest.raises(ControllerError, match="broken"):
        fit(function, tmp_path, failure_config=FailureConfig(max_failures=1))
    assert "Skipped damaged checkpoint checkpoint_000001: " in capfd.readouterr().err


def fail() -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize(
    ("then", "event"),
    [
        (lambda: train.report({}), "report 1 of rank 0"),
        (lambda: save("b"), "report 1 of rank 0"),
        (fail, "rank 0: ValueError: on purpose"),
        (lambda: None, "RunEnded"),
    ],
)
def test_run_whose_directory_is_deleted_fails_with_its_path(
    tmp_path: Path, then: Callable[[], None], event: str
) -> None:
    def function() -> None:
        save("a")
        # Rename first: the checksums of the checkpoint may be written at this moment, and
        # rmtree() fails if a file is added to a directory that it has just emptied.
        os.rename(tmp_path / "run", tmp_path / "deleted")
        shutil.rmtree(tmp_path / "deleted")
        then()

    expected = f"{tmp_path}/run or its journal was deleted or moved during the run, .*{event}"
    with pytest.raises(ControllerError, match=expected):
        fit(function, tmp_path)


def test_run_whose_directory_is_replaced_fails_with_its_path(tmp_path: Path) -> None:
    def function() -> None:
        save("a")
        os.rename(tmp_path / "run", tmp_path / "moved")
        (tmp_path / "run").mkdir()
        train.report({})

    with pytest.raises(ControllerError, match=r"was deleted or moved .* report 1 of rank 0"):
        fit(function, tmp_path)


def test_resume_with_empty_checksums_file_uses_checkpoint(tmp_path: Path) -> None:
    fit(two_steps, tmp_path)
    os.truncate(tmp_path / "run" / "checkpoint_000001" / ".drawbar-checksums.json", 0)
    result = fit(lambda: content(train.get_checkpoint()), tmp_path, resume="must")
    assert result.return_value == "b"


def test_error_of_failed_run_names_only_existing_checkpoint(tmp_path: Path) -> None:
    def function(config: dict[str, Any]) -> None:
        two_steps()
        for name in config["delete"]:
            # Rename, because the checksums of the checkpoint may be written at this moment.
            os.rename(tmp_path / "run" / f"checkpoint_00000{name}", tmp_path / f"gone_{name}")
        fail()

    with pytest.raises(WorkerGroupError, match=r"Latest committed checkpoint: .*_000000$"):
        fit(function, tmp_path, {"delete": [1]})
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "gone_1")
    with pytest.raises(WorkerGroupError, match=r"No complete checkpoint is left"):
        fit(function, tmp_path, {"delete": [0, 1]})


@pytest.mark.parametrize("lost", ["manifest", "directory"])
def test_resume_after_losing_newest_checkpoint_repairs_run(tmp_path: Path, lost: str) -> None:
    def function() -> None:
        for _ in range(2):
            save("a")
        if train.get_context().get_attempt() == 0:
            raise RuntimeError("once")

    with pytest.raises(WorkerGroupError, match="once"):
        fit(function, tmp_path)
    newest = tmp_path / "run" / "checkpoint_000001"
    if lost == "manifest":
        (newest / ".drawbar.json").write_text("{torn")
    else:
        shutil.rmtree(newest)
    fit(function, tmp_path)
    check_run(tmp_path / "run")


def test_interrupted_write_in_staging_area_is_not_a_damaged_checkpoint(
    run: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (run / ".staging").mkdir()
    (run / ".staging" / ".drawbar-checkpoint_000001-.drawbar-checksums.json.1.tmp").write_text("{")
    verified = dict(find_run(run).verify_checkpoints())
    assert verified == {"checkpoint_000000": "", "checkpoint_000001": ""}
    fit(two_steps, run.parent, resume="must")
    assert "damage" not in capfd.readouterr().err
    check_run(run)


def test_journal_path_that_is_a_directory_raises(tmp_path: Path) -> None:
    journal = tmp_path / "run" / "journal.jsonl"
    journal.mkdir(parents=True)
    message = f"{journal} must be the journal of a run, but is a directory"
    with pytest.raises(DamagedRunError, match=message):
        fit(two_steps, tmp_path)
    with pytest.raises(DamagedRunError, match=message):
        Result.from_path(tmp_path / "run")


def test_storage_path_in_home_of_unknown_user_raises() -> None:
    with pytest.raises(ValueError, match="the home directory of user 'no-such-user'"):
        fit(two_steps, Path("~no-such-user/runs"))


@pytest.fixture
def make_read_only(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Return a function that makes the directories of the run read-only, also for root."""
    directories = [str(tmp_path / "run" / name) for name in ("", ".staging")]

    def set_attribute(flag: str) -> None:
        if subprocess.run(["chattr", flag, *directories], capture_output=True).returncode:
            pytest.skip("needs a filesystem with chattr, and permission to use it")

    yield lambda: set_attribute("+i")
    set_attribute("-i")


@pytest.mark.skipif(shutil.which("chattr") is None, reason="needs chattr")
@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, ASYNC])
@pytest.mark.parametrize("is_external", [False, True])
def test_run_whose_directory_becomes_read_only_fails_with_its_path(
    tmp_path: Path,
    make_read_only: Callable[[], None],
    mode: CheckpointUploadMode,
    is_external: bool,
) -> None:
    def function() -> None:
        save("a")
        directory = tmp_path / "external"
        directory.mkdir()
        (directory / "model").write_text("b")
        with train.checkpoint_dir() as path:
            (path / "model").write_text("b")
            make_read_only()
            train.report(
                {}, checkpoint=directory if is_external else path, checkpoint_upload_mode=mode
            )

    run = tmp_path / "run"
    with pytest.raises(
        WorkerGroupError if is_external else ControllerError, match=f"{run}.*"
    ) as raised:
        fit(function, tmp_path)
    message = str(raised.value)
    assert "Operation not permitted" in message
    assert ("rank 0: StorageError" in message) is is_external
    assert f"Latest committed checkpoint: {run}/checkpoint_000000" in message
    if is_external:
        assert (tmp_path / "external" / "model").read_text() == "b"
