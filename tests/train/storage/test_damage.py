"""Damage of a run's directory is said before the first step, and costs no intact checkpoint."""

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
from tests.train.local_runs import ASYNC, content, fit, save


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
def test_a_run_whose_journal_is_lost_goes_on_from_its_newest_checkpoint(
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
    assert sorted(each.name for each in run.glob("checkpoint_*")) == [
        f"checkpoint_00000{index}" for index in range(3)
    ]
    assert "its journal, which is empty or missing" in capfd.readouterr().err
    check_run(run)


@LOSSES
def test_a_run_whose_journal_is_lost_is_not_a_new_one(
    run: Path, lose: Callable[[Path], None]
) -> None:
    lose(run)
    with pytest.raises(ResumeError, match="holds a run with damaged parts"):
        fit(two_steps, run.parent, resume="never")


@LOSSES
@pytest.mark.parametrize("read", [Result.from_path, train.attach])
def test_who_reads_a_run_whose_journal_is_lost_is_told(
    run: Path, lose: Callable[[Path], None], read: Callable[[Path], Any]
) -> None:
    lose(run)
    with pytest.raises(DamagedRunError, match=r"journal\.jsonl is empty or gone, and checkpoint_0"):
        read(run)
    assert DataParallelTrainer.restore(run).fit().return_value == 1


def set_newer_format(path: Path) -> bytes:
    """Set a newer format version, and change a field as only a new format may."""
    newer = re.sub(rb'"format_version": ?1\b', b'"format_version":2', path.read_bytes())
    newer = newer.replace(b'"name":', b'"title":', 1)
    assert b'"format_version":2' in newer
    path.write_bytes(newer)
    return newer


def test_journal_of_newer_format_raises_and_stays_as_it_is(run: Path) -> None:
    journal = run / "journal.jsonl"
    newer = set_newer_format(journal)
    expected = (
        f"{journal} has format version 2, but this version of Drawbar supports format version 1. "
        "Upgrade Drawbar"
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


def test_manifest_of_newer_format_raises_and_stays_as_it_is(run: Path) -> None:
    manifest = run / "checkpoint_000001" / ".drawbar.json"
    newer = set_newer_format(manifest)
    for use in (
        lambda: fit(two_steps, run.parent),
        lambda: find_run(run).list_checkpoints(),
        lambda: train.Checkpoint(manifest.parent).verify(),
    ):
        with pytest.raises(
            UnsupportedFormatError, match=f"{manifest} has format version 2, but .* version 1"
        ):
            use()
    assert manifest.read_bytes() == newer
    assert not (run / "broken").exists()


def test_settings_of_another_version_are_read_as_far_as_they_are_known(run: Path) -> None:
    first, *rest = (run / "journal.jsonl").read_text().splitlines(keepends=True)
    started = json.loads(first)
    for value in ({"num_to_keep": 1, "by_size": True}, {"num_to_keep": "many"}, "all of them"):
        started["config"]["checkpoint_config"] = value
        (run / "journal.jsonl").write_text(json.dumps(started) + "\n" + "".join(rest))
        assert len(Result.from_path(run).best_checkpoints) == 2
        assert len(train.attach(run).wait().best_checkpoints) == 2
    assert fit(two_steps, run.parent).return_value == 1


@pytest.mark.parametrize("damage", [b"", b"\x80\x04garbage", b"\x80\x04K\x01.", b"cgone\nf\n."])
def test_a_trainer_that_does_not_unpickle_is_named(run: Path, damage: bytes) -> None:
    (run / "trainer.pkl").write_bytes(damage)
    with pytest.raises(DamagedRunError, match=f"^{run}/trainer.pkl cannot be unpickled here: "):
        DataParallelTrainer.restore(run)


NESTED = b'{"event":"checkpoint","metrics":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
"""Deeper than can be decoded."""


def test_a_line_and_a_manifest_that_are_nested_too_deeply_are_damage(run: Path) -> None:
    with open(run / "journal.jsonl", "ab") as journal:
        journal.write(NESTED + b"\n")
    (run / "checkpoint_000001" / ".drawbar.json").write_bytes(NESTED)
    with pytest.raises(DamagedRunError, match=r"line \d+ of .* cannot be read"):
        Result.from_path(run)
    result = fit(two_steps, run.parent)
    assert content(result.checkpoint) == "b"
    assert (run / "journal.damaged").exists()


def test_result_of_journal_without_some_lines_is_read_or_damaged(run: Path) -> None:
    lines = (run / "journal.jsonl").read_bytes().splitlines(keepends=True)
    for number in range(1, len(lines)):
        for left in (lines[:number] + lines[number + 1 :], lines[number:], lines[:number]):
            (run / "journal.jsonl").write_bytes(b"".join(left))
            try:
                result = Result.from_path(run)
            except DamagedRunError:
                continue
            assert content(result.checkpoint) == "b"
            assert len(result.timeline.attempts) <= 1


def three_steps() -> None:
    checkpoint = train.get_checkpoint()
    for text in "abc"[0 if checkpoint is None else "abc".index(content(checkpoint)) + 1 :]:
        train.report({"text": "between"})
        save(text)


def test_resume_of_journal_truncated_at_each_line_leaves_no_unrecorded_gap(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fit(three_steps, tmp_path)
    original = tmp_path / "run"
    lines = (original / "journal.jsonl").read_bytes().splitlines(keepends=True)
    kinds = [json.loads(line)["event"] for line in lines]
    last_report = max(n for n, kind in enumerate(kinds) if kind == "report")
    for kept in range(1, len(lines) + 1):
        run = tmp_path / f"after_{kept}" / "run"
        shutil.copytree(original, run)
        (run / "journal.jsonl").write_bytes(b"".join(lines[:kept]))
        is_complete = kept > last_report
        if is_complete:  # at most the newest commit and the end of the run are not journaled
            assert content(Result.from_path(run).checkpoint) == "c"
        else:
            message = (
                r"journal\.jsonl ends before checkpoint_000005 was committed: reports \d+ to 5"
            )
            with pytest.raises(DamagedRunError, match=message):
                Result.from_path(run)
            with pytest.raises(DamagedRunError, match=r'fit\(\) with resume="auto"'):
                check_run(run)
            assert "lacks reports" in dict(find_run(run).verify_checkpoints())["journal.jsonl"]
            with pytest.raises(ResumeError, match="holds a run with damaged parts"):
                fit(three_steps, run.parent, resume="never")
        capfd.readouterr()
        result = fit(save_once, run.parent)
        assert ("its journal, which lacks reports" in capfd.readouterr().err) == (not is_complete)
        assert content(result.checkpoint) == "d"
        check_run(run)
        assert result.metrics_dataframe["index"].tolist()[-1] == 6
        assert content(Result.from_path(run).checkpoint) == "d"


def save_once() -> None:
    assert content(train.get_checkpoint()) == "c"
    save("d")


def test_resume_of_truncated_journal_keeps_the_reports_that_it_has(tmp_path: Path) -> None:
    fit(three_steps, tmp_path)
    journal = tmp_path / "run" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    reports = [n for n, line in enumerate(lines) if json.loads(line)["event"] == "report"]
    journal.write_bytes(b"".join(lines[: reports[3]]))
    result = fit(save_once, tmp_path)
    assert result.metrics_dataframe["index"].tolist() == [0, 1, 2, 6]
    lost = [
        json.loads(line) for line in journal.read_bytes().splitlines() if b"reports_lost" in line
    ]
    assert [(each["first"], each["until"]) for each in lost] == [(3, 6)]


def test_result_of_run_with_copied_checkpoint_of_another_run_is_read(
    run: Path, tmp_path: Path
) -> None:
    fit(three_steps, tmp_path / "other")
    shutil.copytree(tmp_path / "other" / "run" / "checkpoint_000005", run / "pretrained")
    assert Result.from_path(run).error is None


def cut(file: Path) -> None:
    os.truncate(file, 0)


def alter(file: Path) -> None:
    file.write_text("?")


DAMAGES = pytest.mark.parametrize("damage", [cut, Path.unlink, alter])


@DAMAGES
def test_a_resume_passes_over_a_damaged_checkpoint(
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


def test_an_altered_checkpoint_is_kept_aside(run: Path) -> None:
    alter(run / "checkpoint_000001" / "model")
    fit(two_steps, run.parent)
    (aside,) = (run / "broken").iterdir()
    assert (aside / "model").read_text() == "?"


def test_a_run_that_must_go_on_needs_a_checkpoint_that_was_not_altered(run: Path) -> None:
    for checkpoint in run.glob("checkpoint_*"):
        alter(checkpoint / "model")
    with pytest.raises(ResumeError, match="has no intact checkpoint"):
        fit(two_steps, run.parent, resume="must")
    assert not (run / "broken").exists()


@DAMAGES
def test_a_restart_passes_over_a_damaged_checkpoint(
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
    assert "damaged, so passed over: " in capfd.readouterr().err
    check_run(tmp_path / "run")


def fail() -> None:
    raise ValueError("on purpose")


@pytest.mark.parametrize(
    ("then", "told"),
    [
        (lambda: train.report({}), "report 1 of rank 0"),
        (lambda: save("b"), "report 1 of rank 0"),
        (fail, "rank 0: ValueError: on purpose"),
        (lambda: None, "RunEnded"),
    ],
)
def test_run_whose_directory_is_deleted_fails_with_its_path(
    tmp_path: Path, then: Callable[[], None], told: str
) -> None:
    def function() -> None:
        save("a")
        # Rename first: the checksums of the checkpoint may be written at this moment, and
        # rmtree() fails if a file is added to a directory that it has just emptied.
        os.rename(tmp_path / "run", tmp_path / "deleted")
        shutil.rmtree(tmp_path / "deleted")
        then()

    expected = f"{tmp_path}/run, or the journal in it, was deleted or moved while the run .*{told}"
    with pytest.raises(ControllerError, match=expected):
        fit(function, tmp_path)


def test_a_run_whose_directory_is_replaced_says_so(tmp_path: Path) -> None:
    def function() -> None:
        save("a")
        os.rename(tmp_path / "run", tmp_path / "moved")
        (tmp_path / "run").mkdir()
        train.report({})

    with pytest.raises(ControllerError, match=r"was deleted or moved .* report 1 of rank 0"):
        fit(function, tmp_path)


def test_checksums_that_a_power_cut_has_emptied_cost_no_checkpoint(tmp_path: Path) -> None:
    fit(two_steps, tmp_path)
    os.truncate(tmp_path / "run" / "checkpoint_000001" / ".drawbar-checksums.json", 0)
    result = fit(lambda: content(train.get_checkpoint()), tmp_path, resume="must")
    assert result.return_value == "b"


def test_no_checkpoint_is_named_that_is_not_there_any_more(tmp_path: Path) -> None:
    def function(config: dict[str, Any]) -> None:
        two_steps()
        for name in config["delete"]:
            # By a rename: its checksums may be written in this moment.
            os.rename(tmp_path / "run" / f"checkpoint_00000{name}", tmp_path / f"gone_{name}")
        fail()

    with pytest.raises(WorkerGroupError, match=r"newest committed checkpoint: .*_000000$"):
        fit(function, tmp_path, {"delete": [1]})
    shutil.rmtree(tmp_path / "run")
    shutil.rmtree(tmp_path / "gone_1")
    with pytest.raises(WorkerGroupError, match=r"no committed checkpoint is there any more"):
        fit(function, tmp_path, {"delete": [0, 1]})


@pytest.mark.parametrize("lost", ["manifest", "directory"])
def test_a_run_whose_newest_checkpoint_is_lost_is_whole_again_when_it_goes_on(
    tmp_path: Path, lost: str
) -> None:
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


def test_a_folder_in_the_place_of_the_journal_is_named(tmp_path: Path) -> None:
    journal = tmp_path / "run" / "journal.jsonl"
    journal.mkdir(parents=True)
    told = f"{journal} is a folder, where the journal"
    with pytest.raises(DamagedRunError, match=told):
        fit(two_steps, tmp_path)
    with pytest.raises(DamagedRunError, match=told):
        Result.from_path(tmp_path / "run")


def test_the_home_of_a_user_who_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match="the home of a user 'no-such-user', whom this machine"):
        fit(two_steps, Path("~no-such-user/runs"))


@pytest.fixture
def lock(tmp_path: Path) -> Iterator[Callable[[], None]]:
    """Makes the folders of the run `run` read-only, for root too, until the test is over."""
    folders = [str(tmp_path / "run" / name) for name in ("", ".staging")]

    def change(flag: str) -> None:
        if subprocess.run(["chattr", flag, *folders], capture_output=True).returncode:
            pytest.skip("needs a filesystem with chattr, and the right to use it")

    yield lambda: change("+i")
    change("-i")


@pytest.mark.skipif(shutil.which("chattr") is None, reason="needs chattr")
@pytest.mark.parametrize("mode", [CheckpointUploadMode.SYNC, ASYNC])
@pytest.mark.parametrize("own", [False, True])
def test_a_run_whose_directory_is_made_read_only_says_so(
    tmp_path: Path, lock: Callable[[], None], mode: CheckpointUploadMode, own: bool
) -> None:
    def function() -> None:
        save("a")
        folder = tmp_path / "own"
        folder.mkdir()
        (folder / "model").write_text("b")
        with train.checkpoint_dir() as path:
            (path / "model").write_text("b")
            lock()
            train.report({}, checkpoint=folder if own else path, checkpoint_upload_mode=mode)

    run = tmp_path / "run"
    with pytest.raises(WorkerGroupError if own else ControllerError, match=f"{run}.*") as caught:
        fit(function, tmp_path)
    told = str(caught.value)
    assert "Operation not permitted" in told
    assert ("rank 0: StorageError" in told) is own
    assert f"newest committed checkpoint: {run}/checkpoint_000000" in told
    if own:
        assert (tmp_path / "own" / "model").read_text() == "b"
