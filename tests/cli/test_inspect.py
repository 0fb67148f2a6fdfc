"""Tests of the commands that inspect runs: finished, running, interrupted, and damaged ones."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import json
import os
import platform
import re
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig
from drawbar.train.runs import find_run
from tests.cli.conftest import Command, make_run
from tests.train.report_segments import read_reports, write_reports

LINE_SIZE = 4_000_000
"""Bytes of one line of a log, and of one line of a journal."""


def test_runs_lists_newest_first(
    cli: Command, shared_storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(
        "COLUMNS", "120"
    )  # wide enough for all metrics, whatever the age of the run is
    head, *rows = cli("runs", shared_storage).out.splitlines()
    assert head.split()[:3] == ["NAME", "STATUS", "STARTED"]
    assert [row.split()[:2] for row in rows] == [
        ["failed", "failed"],
        ["short", "finished"],
        ["long", "finished"],
    ]
    assert "loss 0.3333, val/acc 0.1" in rows[2]
    data = json.loads(cli("runs", shared_storage, "--json").out)
    assert (data[2]["attempts"], data[2]["metrics"]["loss"]) == (1, 1 / 3)
    size = sum(
        path.stat().st_size for path in (shared_storage / "long").rglob("*") if path.is_file()
    )
    assert data[2]["size"] == size


def test_runs_lists_runs_in_subdirectories(
    cli: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    storage = tmp_path / "drawbar_results"
    for name in ("plain", "x/y", "x/deep/z"):
        make_run(storage, name, 1)
    (tmp_path / "elsewhere").mkdir()
    make_run(tmp_path / "elsewhere", "linked", 1)
    (storage / "link").symlink_to(tmp_path / "elsewhere")
    runs = json.loads(cli("runs", storage, "--json").out)
    assert sorted(run["name"] for run in runs) == ["plain", "x/deep/z", "x/y"]
    assert cli("show", "x/y").out.splitlines()[1] == str(storage / "x" / "y")
    assert cli("clean", storage, "--keep", "1").code == 0


def test_runs_of_object_store_lists_runs_in_subdirectories(cli: Command) -> None:
    address = f"memory://{uuid.uuid4().hex}"
    make_run(address, "x/y", 1)
    (run,) = json.loads(cli("runs", address, "--json").out)
    assert (run["name"], run["path"].endswith("/x/y")) == ("x/y", True)


def test_show_prints_drawbar_version(cli: Command, shared_storage: Path) -> None:
    shown = json.loads(cli("show", shared_storage / "short", "--json").out)
    assert shown["drawbar_version"] == importlib.metadata.version("drawbar")


def test_show_prints_durations_in_seconds(cli: Command, shared_storage: Path) -> None:
    out = cli("show", shared_storage / "short").out
    assert "timedelta" not in out
    assert re.search(r"failure_config/stall_warning_after +30\.0\n", out)


def test_commands_read_runs_of_object_store(cli: Command) -> None:
    address = f"memory://{uuid.uuid4().hex}"
    make_run(address, "there", 2)
    (result,) = json.loads(cli("runs", address, "--json").out)
    assert (result["name"], result["status"]) == ("there", "finished")
    assert result["size"] > 0
    assert cli("logs", f"{address}/there").out.splitlines() == ["epoch 0", "epoch 1"]
    assert cli("verify", f"{address}/there").code == 0
    assert "Similar names: there." in cli("show", f"{address}/their").err


def test_run_name_is_looked_up_in_default_storage(
    cli: Command, shared_storage: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "drawbar_results").symlink_to(shared_storage)
    assert cli("show", "short").out.startswith("short  finished\n")
    assert cli("show", "shart").err.endswith("Similar names: short.\n")
    monkeypatch.chdir(shared_storage)
    (tmp_path / "drawbar_results").unlink()
    assert cli("show", "short").out.startswith("short  finished\n")


def test_show_prints_attempts_checkpoints_metrics_and_error(
    cli: Command, shared_storage: Path
) -> None:
    shown = cli("show", shared_storage / "failed").out
    assert "attempt 0: 1 worker," in shown
    assert "ValueError: boom" in shown
    assert f"arguments of your RunConfig: name='failed', storage_path='{shared_storage}'." in shown
    assert "checkpoint_000000" in shown
    assert f"\n  directory  {Path.cwd()}\n" in shown
    assert re.search(r"\nVersions\n  ray +\d", shown)
    assert "RunConfig: name=" not in cli("show", shared_storage / "short").out
    data = json.loads(cli("show", shared_storage / "long", "--json").out)
    assert [checkpoint["index"] for checkpoint in data["checkpoints"]] == [0, 1, 2]
    assert data["config"]["train_loop_config"]["epochs"] == "3"
    assert data["environment"]["python"] == platform.python_version()
    assert data["versions"]["ray"] == importlib.metadata.version("ray")
    assert 0 < data["goodput"]["worker_seconds"] <= data["goodput"]["requested_worker_seconds"]


def test_show_of_run_with_killed_driver_prints_interrupted(
    cli: Command, interrupted_run: Path
) -> None:
    assert cli("show", interrupted_run).out.startswith("long  interrupted\n")
    assert json.loads(cli("show", interrupted_run, "--json").out)["goodput"]["productive"] > 0


def test_show_of_damaged_run_prints_readable_parts(cli: Command, storage: Path) -> None:
    journal = storage / "long" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join([*lines[:2], b"\xff{\n", *lines[2:]]))
    shown = cli("show", storage / "long").out
    assert "Journal damaged: the journal cannot be read in line 3" in shown
    assert "loss     0.3333" in shown
    (storage / "short" / "journal.jsonl").unlink()
    shown = cli("show", storage / "short").out
    assert "the journal is empty or missing" in shown
    assert "checkpoint_000001" in shown


def test_runs_lists_unreadable_runs_after_others(
    cli: Command, storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # no cell is shortened
    (storage / "loop").symlink_to("loop")
    (storage / "long" / "loop").symlink_to("loop")
    (storage / "folder" / "journal.jsonl").mkdir(parents=True)
    for name in ("fifo", "linked"):
        (storage / name).mkdir()
    os.mkfifo(storage / "fifo" / "journal.jsonl")
    (storage / "linked" / "journal.jsonl").symlink_to("journal.jsonl")
    rows = [row.split() for row in cli("runs", storage).out.splitlines()[1:]]
    assert [row[0] for row in rows[:3]] == ["failed", "short", "long"]
    names = ("fifo", "folder", "linked")
    assert [row[:4] for row in rows[3:]] == [
        [name, "unknown", "(journal", "damaged)"] for name in names
    ]
    kinds = {"fifo": "a FIFO", "folder": "a directory", "linked": "a symbolic link that leads back"}
    for name, kind in kinds.items():
        assert f"is {kind}" in cli("show", storage / name).out
    assert cli("show", storage / "long").code == 0
    log = storage / "long" / "logs" / "rank_0.log"
    log.unlink()
    log.mkdir()
    result = cli("logs", storage / "long")
    assert (result.code, result.err) == (2, f"drawbar: error: {log}: is a directory, not a file\n")


def test_show_lists_unreadable_manifests_after_checkpoints(cli: Command, storage: Path) -> None:
    manifests = [
        storage / "long" / f"checkpoint_00000{number}" / ".drawbar.json" for number in range(2)
    ]
    for manifest in manifests:
        manifest.unlink()
    manifests[0].mkdir()
    os.mkfifo(manifests[1])
    shown = cli("show", storage / "long")
    assert shown.code == 0
    assert (
        "checkpoint_000000  unreadable: it does not exist, or has no readable .drawbar" in shown.out
    )
    data = json.loads(cli("show", storage / "long", "--json").out)
    assert list(data["unreadable"]) == ["checkpoint_000000", "checkpoint_000001"]
    assert [checkpoint["name"] for checkpoint in data["checkpoints"]] == ["checkpoint_000002"]
    verified = json.loads(cli("verify", storage / "long", "--json").out)["checkpoints"]
    assert [bool(damage) for damage in verified.values()] == [True, True, False]
    (storage / "short" / "places.json").write_text("{")
    (storage / "short" / "journal.jsonl").unlink()
    shown = cli("show", storage / "short")
    assert "the journal is empty or missing" in shown.out
    assert "places.json  unreadable: " in shown.out
    assert "checkpoint_000001  " in shown.out
    assert "places.json: " in cli("verify", storage / "short").out
    assert cli("clean", storage / "short", "--keep", 1).code == 0


def test_runs_of_object_store_with_damaged_run_lists_others(cli: Command) -> None:
    import fsspec

    bucket = uuid.uuid4().hex
    files = fsspec.filesystem("memory")
    files.pipe_file(f"/{bucket}/damaged/places.json", b"{")
    make_run(f"memory://{bucket}", "intact", 1)
    data = json.loads(cli("runs", f"memory://{bucket}", "--json").out)
    assert [(run["name"], bool(run["damage"])) for run in data] == [
        ("intact", False),
        ("damaged", True),
    ]


def test_runs_with_implausible_time_lists_run_last(cli: Command, storage: Path) -> None:
    journal = storage / "failed" / "journal.jsonl"
    first, *rest = journal.read_bytes().splitlines(keepends=True)
    started = json.dumps({**json.loads(first), "time": 1e300}).encode()
    journal.write_bytes(b"".join([started + b"\n", *rest]))
    rows = cli("runs", storage).out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["short", "long", "failed"]
    assert "  unknown  " in rows[-1]
    assert "Started unknown, failed " in cli("show", storage / "failed").out
    journal.write_text(journal.read_text().replace('"attempt_started"', '"nothing"'))
    journal.write_text(re.sub(r'"time":\s*[\d.e+]+', '"time":-1e300', journal.read_text()))
    assert not re.search(r"\d{30}", cli("show", storage / "failed").out)


def test_tables_and_plots_fit_terminal_width(
    cli: Command, shared_storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = shared_storage / "long"
    commands = (
        ("runs", shared_storage),
        ("compare", run, shared_storage / "short", "--all"),
        ("plot", run),
    )
    monkeypatch.delenv("COLUMNS", raising=False)
    untruncated = cli("runs", shared_storage).out.splitlines()
    assert max(map(len, untruncated)) > 60
    monkeypatch.setenv("COLUMNS", "60")
    for command in commands:
        lines = cli(*command).out.splitlines()
        assert max(map(len, lines)) <= 60
    rows = cli("runs", shared_storage).out.splitlines()
    assert rows[1].startswith("failed  failed  ")
    assert rows[1].endswith("...")


def test_names_with_invalid_characters_are_escaped(cli: Command, storage: Path) -> None:
    (storage / "long").rename(storage / os.fsdecode(b"bad\xff"))
    (storage / "short").rename(storage / "a\x1b[31m\nb")
    data = json.loads(cli("runs", storage, "--json").out)
    assert {run["name"] for run in data} == {"bad\\xff", "a\x1b[31m\nb", "failed"}
    shown = cli("runs", storage).out
    assert "a\\x1b[31m\\x0ab  finished" in shown
    assert "bad\\xff" in shown
    journal = storage / "failed" / "journal.jsonl"
    journal.write_text(journal.read_text().replace("boom", "bo\\u001b[31mom"))
    for name in ("failed", "a\x1b[31m\nb"):
        assert "\x1b" not in cli("show", storage / name).out
    assert "bo\\x1b[31mom" in cli("show", storage / "failed").out
    assert cli("show", storage / os.fsdecode(b"bad\xff"), "--json").code == 0


def test_output_to_full_disk_prints_one_line(
    cli: Command, shared_storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in (("logs", shared_storage / "long", "--json"), ("runs", shared_storage)):
        with open("/dev/full", "w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            result = cli(*command)
        assert (result.code, result.err) == (2, "drawbar: error: No space left on device\n")


def test_show_ignores_journal_fields_of_later_versions(cli: Command, storage: Path) -> None:
    journal = storage / "long" / "journal.jsonl"
    lines = journal.read_text().splitlines()
    later = [json.dumps({**json.loads(line), "later": 1}) for line in lines]
    journal.write_text("".join(f"{line}\n" for line in later))
    assert json.loads(cli("show", storage / "long", "--json").out)["damage"] == ""


def test_logs_prints_output_of_one_rank(cli: Command, shared_storage: Path) -> None:
    lines = cli("logs", shared_storage / "short").out.splitlines()
    assert lines == ["epoch 0", "epoch 1"]  # without the lines of the console
    assert json.loads(cli("logs", shared_storage / "short", "--json").out) == lines
    refused = cli("logs", shared_storage / "short", "--rank", 7)
    assert (refused.code, refused.out) == (2, "")
    assert "no log for rank 7" in refused.err


def print_and_wait(config: dict[str, str]) -> None:
    print("." * LINE_SIZE)
    train.report({"text": "." * LINE_SIZE})
    print("waiting", flush=True)
    with open(config["gate"]) as pipe:  # blocks until the test opens the pipe, too
        print(pipe.read(), flush=True)


def bytes_read_by(pid: int) -> int:
    return int(Path(f"/proc/{pid}/io").read_text().split()[1])  # rchar


def test_logs_of_failed_run_prints_root_cause_rank_and_error(
    cli: Command, shared_storage: Path
) -> None:
    shown = cli("logs", shared_storage / "failed")
    assert shown.err == "Rank 0 caused the failure of the run. Its output:\n"
    assert "ValueError: boom" in shown.out
    assert cli("logs", shared_storage / "failed", "--rank", 0).err == ""


def test_logs_follow_prints_until_run_ends(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    run = DataParallelTrainer(
        print_and_wait,
        train_loop_config={"gate": str(gate)},
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="live", storage_path=tmp_path),
    ).start()
    command = [sys.executable, "-m", "drawbar.cli", "logs", str(tmp_path / "live"), "--follow"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = iter(process.stdout.readline, "")
        assert "waiting\n" in lines
        before = bytes_read_by(process.pid)
        assert find_run(run.path).status == "running"
        stacks_command = [*command[:3], "stacks", str(tmp_path / "live"), "--json"]
        data = json.loads(subprocess.check_output(stacks_command, text=True))
        assert "in print_and_wait" in data["stacks"]["0"].split("\nThread ")[0]
        gate.write_text("and ends")
        assert "and ends\n" in lines
        # The log is not read again. The journal's line of the report may be read once.
        assert bytes_read_by(process.pid) - before < 2 * LINE_SIZE
    run.wait()
    assert process.returncode == 0


def test_compare_prints_different_settings(cli: Command, shared_storage: Path) -> None:
    two = (shared_storage / "long", shared_storage / "short")
    rows = [line.split() for line in cli("compare", *two).out.splitlines()]
    assert rows[0] == ["long", "short"]
    assert ["train_loop_config/epochs", "3", "2"] in rows
    assert ["loss", "0.3333", "0.5"] in rows
    assert "num_workers" not in cli("compare", *two).out
    assert "num_workers" in cli("compare", *two, "--all").out
    data = json.loads(cli("compare", *two, "--json").out)
    assert data["metrics"]["val/acc"] == [0.1, 0.1]
    assert cli("compare", two[0]).code == 2


def test_plot_draws_in_terminal_and_to_file(
    cli: Command, shared_storage: Path, tmp_path: Path
) -> None:
    run = shared_storage / "long"
    name, _, *_, last, axis, _ = cli("plot", run, "loss").out.splitlines()
    assert name == "loss"
    assert last.startswith("0.3333 ┤")
    assert axis.split() == ["0", "2"]
    assert cli("plot", run, "-o", tmp_path / "curves.png").code == 0
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(cli("plot", run, "--json").out)["loss"]["1"] == 0.5
    assert "Available: loss, val/acc." in cli("plot", run, "los").err
    assert cli("plot", run, "-o", tmp_path / "curves.doc").code == 2
    assert cli("plot", run, "--json", "-o", tmp_path / "curves.png").code == 2


def test_export_writes_one_row_per_report(
    cli: Command, shared_storage: Path, tmp_path: Path
) -> None:
    from pyarrow import parquet

    rows = list(csv.DictReader(io.StringIO(cli("export", shared_storage / "long", "--csv").out)))
    assert [float(row["loss"]) for row in rows] == [1.0, 0.5, 1 / 3]
    file = tmp_path / "reports.parquet"
    assert cli("export", shared_storage / "long", "--parquet", "-o", file).code == 0
    assert parquet.read_table(file).column("val/acc").to_pylist() == [0.1] * 3
    assert len(json.loads(cli("export", shared_storage / "long", "--json").out)) == 3
    assert cli("export", shared_storage / "long", "--json", "-o", file).out == ""
    assert len(json.loads(file.read_text())) == 3
    assert cli("export", shared_storage / "long", "--csv", "--json").code == 2


def test_plot_of_extreme_values_draws_them(cli: Command, storage: Path) -> None:
    text = b"".join(read_reports(storage / "long"))
    for old, new in ((b"1.0", b"1e308"), (b"0.5", b"-1e308")):
        text = text.replace(b'"loss":[%b]' % old, b'"loss":[%b]' % new)
    write_reports(storage / "long", [text])
    assert "1e+308 ┤" in cli("plot", storage / "long", "loss").out
    assert "█▁" in cli("show", storage / "long").out


def test_verify_finds_changed_and_missing_files(cli: Command, storage: Path) -> None:
    run = storage / "long"
    assert cli("verify", run).out.splitlines() == [
        f"checkpoint_00000{index}: ok" for index in range(3)
    ]
    (run / "checkpoint_000000" / "model").write_text("WEIGHTS")
    (run / "checkpoint_000001" / "model").unlink()
    (run / "checkpoint_000002").rename(storage / "elsewhere")
    result = cli("verify", run, "--json")
    assert result.code == 1
    damage_by_name = json.loads(result.out)["checkpoints"]
    assert "is missing" in damage_by_name["checkpoint_000001"]
    assert list(damage_by_name) == [f"checkpoint_00000{index}" for index in range(3)]
    assert all(damage_by_name.values())
