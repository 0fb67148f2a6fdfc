"""What commands tell of runs that are over, go on, were cut off, or are damaged."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig
from drawbar.train.runs import find_run
from tests.cli.conftest import Command, fit

MUCH = 4_000_000
"""Bytes of a line of a log, and of one of a journal."""


def test_runs_lists_the_newest_first(
    drawbar: Command, runs_made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # room for all metrics, however long ago a run was
    head, *rows = drawbar("runs", runs_made).out.splitlines()
    assert head.split()[:3] == ["NAME", "STATUS", "STARTED"]
    assert [row.split()[:2] for row in rows] == [
        ["failed", "failed"],
        ["short", "finished"],
        ["long", "finished"],
    ]
    assert "loss 0.3333, val/acc 0.1" in rows[2]
    told = json.loads(drawbar("runs", runs_made, "--json").out)
    assert (told[2]["attempts"], told[2]["metrics"]["loss"]) == (1, 1 / 3)
    size = sum(path.stat().st_size for path in (runs_made / "long").rglob("*") if path.is_file())
    assert told[2]["size"] == size


def test_runs_lists_runs_whose_names_have_folders(
    drawbar: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    storage = tmp_path / "drawbar_results"
    for name in ("plain", "x/y", "x/deep/z"):
        fit(storage, name, 1)
    (tmp_path / "elsewhere").mkdir()
    fit(tmp_path / "elsewhere", "linked", 1)
    (storage / "link").symlink_to(tmp_path / "elsewhere")
    runs = json.loads(drawbar("runs", storage, "--json").out)
    assert sorted(run["name"] for run in runs) == ["plain", "x/deep/z", "x/y"]
    assert drawbar("show", "x/y").out.splitlines()[1] == str(storage / "x" / "y")
    assert drawbar("clean", storage, "--keep", "1").code == 0


def test_runs_of_object_store_lists_runs_whose_names_have_folders(drawbar: Command) -> None:
    address = f"memory://{uuid.uuid4().hex}"
    fit(address, "x/y", 1)
    (run,) = json.loads(drawbar("runs", address, "--json").out)
    assert (run["name"], run["path"].endswith("/x/y")) == ("x/y", True)


def test_show_prints_durations_in_seconds(drawbar: Command, runs_made: Path) -> None:
    out = drawbar("show", runs_made / "short").out
    assert "timedelta" not in out
    assert re.search(r"failure_config/stall_warning_after +30\.0\n", out)


def test_runs_of_an_object_store(drawbar: Command) -> None:
    address = f"memory://{uuid.uuid4().hex}"
    fit(address, "there", 2)
    (told,) = json.loads(drawbar("runs", address, "--json").out)
    assert (told["name"], told["status"]) == ("there", "finished")
    assert told["size"] > 0
    assert {"epoch 0", "epoch 1"} < set(drawbar("logs", f"{address}/there").out.splitlines())
    assert drawbar("verify", f"{address}/there").code == 0
    assert "Similar names: there." in drawbar("show", f"{address}/their").err


def test_a_name_is_one_of_the_default_storage(
    drawbar: Command, runs_made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "drawbar_results").symlink_to(runs_made)
    assert drawbar("show", "short").out.startswith("short  finished\n")
    assert drawbar("show", "shart").err.endswith("Similar names: short.\n")
    monkeypatch.chdir(runs_made)
    (tmp_path / "drawbar_results").unlink()
    assert drawbar("show", "short").out.startswith("short  finished\n")


def test_show_tells_attempts_checkpoints_metrics_and_the_error(
    drawbar: Command, runs_made: Path
) -> None:
    shown = drawbar("show", runs_made / "failed").out
    assert "attempt 0: 1 workers" in shown
    assert "ValueError: boom" in shown
    assert "checkpoint_000000" in shown
    told = json.loads(drawbar("show", runs_made / "long", "--json").out)
    assert [each["index"] for each in told["checkpoints"]] == [0, 1, 2]
    assert told["config"]["train_loop_config"]["epochs"] == "3"
    (attempt,) = told["attempts"]
    whole = told["seconds"]["starting"] + told["seconds"]["training"]
    assert whole == pytest.approx(attempt["end_time"] - attempt["start_time"])


def test_a_run_whose_driver_is_gone_is_interrupted(drawbar: Command, interrupted: Path) -> None:
    assert drawbar("show", interrupted).out.startswith("long  interrupted\n")
    assert json.loads(drawbar("show", interrupted, "--json").out)["seconds"]["training"] > 0


def test_a_damaged_run_is_shown_as_far_as_it_can_be_read(drawbar: Command, storage: Path) -> None:
    journal = storage / "long" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], b"\xff{\n", *lines[2:]]))
    shown = drawbar("show", storage / "long").out
    assert "damaged: the journal cannot be read in line 3" in shown
    assert "loss     0.3333" in shown
    (storage / "short" / "journal.jsonl").unlink()
    shown = drawbar("show", storage / "short").out
    assert "the journal is empty or missing" in shown
    assert "checkpoint_000001" in shown


def test_what_cannot_be_opened_is_named_beside_the_rest(drawbar: Command, storage: Path) -> None:
    (storage / "loop").symlink_to("loop")
    (storage / "long" / "loop").symlink_to("loop")
    (storage / "folder" / "journal.jsonl").mkdir(parents=True)
    for name in ("fifo", "linked"):
        (storage / name).mkdir()
    os.mkfifo(storage / "fifo" / "journal.jsonl")
    (storage / "linked" / "journal.jsonl").symlink_to("journal.jsonl")
    rows = [row.split()[:3] for row in drawbar("runs", storage).out.splitlines()[1:]]
    assert [row[0] for row in rows[:3]] == ["failed", "short", "long"]
    names = ("fifo", "folder", "linked")
    assert rows[3:] == [[name, "unknown", "(damaged)"] for name in names]
    found = {"fifo": "a FIFO", "folder": "a directory", "linked": "a symbolic link that leads back"}
    for name, what in found.items():
        assert f"is {what}" in drawbar("show", storage / name).out
    assert drawbar("show", storage / "long").code == 0
    log = storage / "long" / "logs" / "rank_0.log"
    log.unlink()
    log.mkdir()
    told = drawbar("logs", storage / "long")
    assert (told.code, told.err) == (2, f"drawbar: {log}: is a directory, not a file\n")


def test_what_is_no_manifest_and_no_list_is_named_beside_the_rest(
    drawbar: Command, storage: Path
) -> None:
    manifests = [
        storage / "long" / f"checkpoint_00000{number}" / ".drawbar.json" for number in range(2)
    ]
    for manifest in manifests:
        manifest.unlink()
    manifests[0].mkdir()
    os.mkfifo(manifests[1])
    shown = drawbar("show", storage / "long")
    assert shown.code == 0
    assert (
        "checkpoint_000000 cannot be read: it does not exist, or has no readable .drawbar"
        in shown.out
    )
    told = json.loads(drawbar("show", storage / "long", "--json").out)
    assert list(told["unreadable"]) == ["checkpoint_000000", "checkpoint_000001"]
    assert [each["name"] for each in told["checkpoints"]] == ["checkpoint_000002"]
    checked = json.loads(drawbar("verify", storage / "long", "--json").out)["checkpoints"]
    assert [bool(wrong) for wrong in checked.values()] == [True, True, False]
    (storage / "short" / "places.json").write_text("{")
    (storage / "short" / "journal.jsonl").unlink()
    shown = drawbar("show", storage / "short")
    assert "the journal is empty or missing" in shown.out
    assert "places.json cannot be read: " in shown.out
    assert "checkpoint_000001  " in shown.out
    assert "places.json: " in drawbar("verify", storage / "short").out
    assert drawbar("clean", storage / "short", "--keep", 1).code == 0


def test_a_list_that_cannot_be_read_hides_no_other_run_of_an_object_store(drawbar: Command) -> None:
    import fsspec

    place = uuid.uuid4().hex
    files = fsspec.filesystem("memory")
    files.pipe_file(f"/{place}/damaged/places.json", b"{")
    fit(f"memory://{place}", "whole", 1)
    told = json.loads(drawbar("runs", f"memory://{place}", "--json").out)
    assert [(each["name"], bool(each["damage"])) for each in told] == [
        ("whole", False),
        ("damaged", True),
    ]


def test_a_time_that_no_clock_tells_is_unknown_and_comes_last(
    drawbar: Command, storage: Path
) -> None:
    journal = storage / "failed" / "journal.jsonl"
    first, *rest = journal.read_bytes().splitlines(keepends=True)
    started = json.dumps({**json.loads(first), "time": 1e300}).encode()
    journal.write_bytes(b"".join([started + b"\n", *rest]))
    rows = drawbar("runs", storage).out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["short", "long", "failed"]
    assert "  unknown  " in rows[-1]
    assert "started unknown, last heard of " in drawbar("show", storage / "failed").out
    journal.write_text(journal.read_text().replace('"attempt_started"', '"nothing"'))
    journal.write_text(re.sub(r'"time":\s*[\d.e+]+', '"time":-1e300', journal.read_text()))
    assert max(map(len, drawbar("show", storage / "failed").out.splitlines())) < 400


def test_tables_and_plots_keep_to_the_width_of_the_terminal(
    drawbar: Command, runs_made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runs_made / "long"
    commands = (("runs", runs_made), ("compare", run, runs_made / "short", "--all"), ("plot", run))
    monkeypatch.delenv("COLUMNS", raising=False)
    whole = drawbar("runs", runs_made).out.splitlines()
    assert max(map(len, whole)) > 60
    monkeypatch.setenv("COLUMNS", "60")
    for command in commands:
        lines = drawbar(*command).out.splitlines()
        assert max(map(len, lines)) <= 60
    rows = drawbar("runs", runs_made).out.splitlines()
    assert rows[1].startswith("failed  failed  ")
    assert rows[1].endswith("...")


def test_names_that_are_no_text_are_escaped(drawbar: Command, storage: Path) -> None:
    (storage / "long").rename(storage / os.fsdecode(b"bad\xff"))
    (storage / "short").rename(storage / "a\x1b[31m\nb")
    told = json.loads(drawbar("runs", storage, "--json").out)
    assert {each["name"] for each in told} == {"bad\\xff", "a\x1b[31m\nb", "failed"}
    shown = drawbar("runs", storage).out
    assert "a\\x1b[31m\\x0ab  finished" in shown
    assert "bad\\xff" in shown
    journal = storage / "failed" / "journal.jsonl"
    journal.write_text(journal.read_text().replace("boom", "bo\\u001b[31mom"))
    for name in ("failed", "a\x1b[31m\nb"):
        assert "\x1b" not in drawbar("show", storage / name).out
    assert "bo\\x1b[31mom" in drawbar("show", storage / "failed").out
    assert drawbar("show", storage / os.fsdecode(b"bad\xff"), "--json").code == 0


def test_output_that_cannot_be_written_is_one_line(
    drawbar: Command, runs_made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (("logs", runs_made / "long", "--json"), ("runs", runs_made)):
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            told = drawbar(*command)
        assert (told.code, told.err) == (2, "drawbar: No space left on device\n")


def test_what_a_later_version_adds_is_passed_over(drawbar: Command, storage: Path) -> None:
    journal = storage / "long" / "journal.jsonl"
    lines = journal.read_text().splitlines()
    later = [json.dumps({**json.loads(line), "later": 1}) for line in lines]
    journal.write_text("".join(f"{line}\n" for line in later))
    assert json.loads(drawbar("show", storage / "long", "--json").out)["damage"] == ""


def test_logs_are_those_of_a_rank(drawbar: Command, runs_made: Path) -> None:
    written = drawbar("logs", runs_made / "short").out.splitlines()
    assert [line for line in written if not line.startswith("[")] == ["epoch 0", "epoch 1"]
    assert json.loads(drawbar("logs", runs_made / "short", "--json").out) == written
    refused = drawbar("logs", runs_made / "short", "--rank", 7)
    assert (refused.code, refused.out) == (2, "")
    assert "no log of rank 7" in refused.err


def wait_for(config: dict[str, str]) -> None:
    print("." * MUCH)
    train.report({"said": "." * MUCH})
    print("it goes on", flush=True)
    with open(config["gate"]) as opened:  # until the test opens it too
        print(opened.read(), flush=True)


def bytes_read_by(pid: int) -> int:
    return int(Path(f"/proc/{pid}/io").read_text().split()[1])  # rchar


def test_logs_follow_a_run_to_its_end(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    run = DataParallelTrainer(
        wait_for,
        train_loop_config={"gate": str(gate)},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="live", storage_path=tmp_path),
    ).start()
    command = [sys.executable, "-m", "drawbar.cli", "logs", str(tmp_path / "live"), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert "it goes on\n" in lines
        before = bytes_read_by(process.pid)
        assert find_run(run.path).status == "running"
        asked = [*command[:3], "stacks", str(tmp_path / "live"), "--json"]
        told = json.loads(subprocess.check_output(asked, text=True))
        assert "in wait_for" in told["stacks"]["0"].split("\nThread ")[0]
        gate.write_text("and ends")
        assert "and ends\n" in lines
        # Not the log once more, and the report's line of the journal once, which may come later.
        assert bytes_read_by(process.pid) - before < 2 * MUCH
    run.wait()
    assert process.returncode == 0


def test_compare_shows_what_differs(drawbar: Command, runs_made: Path) -> None:
    two = (runs_made / "long", runs_made / "short")
    rows = [line.split() for line in drawbar("compare", *two).out.splitlines()]
    assert rows[0] == ["long", "short"]
    assert ["train_loop_config/epochs", "3", "2"] in rows
    assert ["loss", "0.3333", "0.5"] in rows
    assert "num_workers" not in drawbar("compare", *two).out
    assert "num_workers" in drawbar("compare", *two, "--all").out
    told = json.loads(drawbar("compare", *two, "--json").out)
    assert told["metrics"]["val/acc"] == [0.1, 0.1]
    assert drawbar("compare", two[0]).code == 2


def test_plot_draws_in_the_terminal_and_into_a_file(
    drawbar: Command, runs_made: Path, tmp_path: Path
) -> None:
    run = runs_made / "long"
    name, _, *_, last, axis, _ = drawbar("plot", run, "loss").out.splitlines()
    assert name == "loss"
    assert last.startswith("0.3333 ┤")
    assert axis.split() == ["0", "2"]
    assert drawbar("plot", run, "-o", tmp_path / "curves.png").code == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(drawbar("plot", run, "--json").out)["loss"]["1"] == 0.5
    assert "it has loss, val/acc" in drawbar("plot", run, "los").err
    assert drawbar("plot", run, "-o", tmp_path / "curves.doc").code == 2


def test_export_writes_a_row_for_each_report(
    drawbar: Command, runs_made: Path, tmp_path: Path
) -> None:
    from pyarrow import parquet

    rows = list(csv.DictReader(io.StringIO(drawbar("export", runs_made / "long", "--csv").out)))
    assert [float(row["loss"]) for row in rows] == [1.0, 0.5, 1 / 3]
    file = tmp_path / "reports.parquet"
    assert drawbar("export", runs_made / "long", "--parquet", "-o", file).code == 0
    assert parquet.read_table(file).column("val/acc").to_pylist() == [0.1] * 3
    assert len(json.loads(drawbar("export", runs_made / "long", "--json").out)) == 3
    assert drawbar("export", runs_made / "long", "--csv", "--json").code == 2


def test_numbers_at_the_ends_of_what_there_is_are_drawn(drawbar: Command, storage: Path) -> None:
    journal = storage / "long" / "journal.jsonl"
    text = journal.read_text()
    for old, new in (("1.0", "1e308"), ("0.5", "-1e308")):
        text = text.replace(f'"loss":{old}', f'"loss":{new}')
    journal.write_text(text)
    assert "1e+308 ┤" in drawbar("plot", storage / "long", "loss").out
    assert "█▁" in drawbar("show", storage / "long").out


def test_verify_finds_what_was_altered_and_what_is_gone(drawbar: Command, storage: Path) -> None:
    run = storage / "long"
    assert drawbar("verify", run).out.splitlines() == [
        f"checkpoint_00000{index}: whole" for index in range(3)
    ]
    (run / "checkpoint_000000" / "model").write_text("WEIGHTS")
    (run / "checkpoint_000001" / "model").unlink()
    (run / "checkpoint_000002").rename(storage / "elsewhere")
    told = drawbar("verify", run, "--json")
    assert told.code == 1
    found = json.loads(told.out)["checkpoints"]
    assert "is missing" in found["checkpoint_000001"]
    assert [name for name, wrong in found.items() if wrong] == sorted(found)
