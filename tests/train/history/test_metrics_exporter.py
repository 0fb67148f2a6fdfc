"""Metrics of stored runs."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig, runs
from tests.train.runs import fit


def collect(text: bytes) -> dict[tuple[str, str], float]:
    """Return the samples by name and first label that does not belong to the run."""
    return {
        (sample.name, next(iter(list(sample.labels.values())[2:]), "")): sample.value
        for family in text_string_to_metric_families(text.decode())
        for sample in family.samples
    }


def report_twice() -> None:
    for step in range(2):
        train.report({"loss": 0.5})
        train.set_progress(step + 1, total=4)


def test_exporter_of_finished_run_matches_its_record(tmp_path: Path) -> None:
    fit(report_twice, tmp_path)
    record = runs.find_run(tmp_path / "run")
    values = collect(runs.MetricsExporter().format([record]))
    assert values["drawbar_run_status", "finished"] == 1
    assert values["drawbar_reports_total", ""] == 2
    assert values["drawbar_attempts_total", ""] == 1
    assert values["drawbar_live_ranks", ""] == 0
    assert values["drawbar_progress_ratio", ""] == 0.5
    assert abs(values["drawbar_goodput_ratio", ""] - (record.goodput.goodput or 0)) < 1e-6


@pytest.mark.alone
def test_exporter_of_200_runs_with_hostile_names_is_fast(tmp_path: Path) -> None:
    fit(report_twice, tmp_path / "original")
    storage = tmp_path / "runs"
    storage.mkdir()
    journal = (tmp_path / "original" / "run" / "journal.jsonl").read_bytes()
    for number in range(200):
        directory = storage / f'run {number} "\n\\ \udcff'
        shutil.copytree(tmp_path / "original" / "run", directory)
        (directory / "journal.jsonl").write_bytes(journal)
    catalog, exporter = runs.RunCatalog([storage]), runs.MetricsExporter()
    first = exporter.format(catalog.list_runs())
    start = time.process_time()
    text = exporter.format(catalog.list_runs())
    assert time.process_time() - start < 1
    assert text.count(b"\ndrawbar_reports_total{") == 200
    assert first.count(b"\ndrawbar_reports_total{") == 200
    assert b"\\udcff" in text


def test_exporter_of_damaged_and_copied_runs_has_each_once(tmp_path: Path) -> None:
    fit(report_twice, tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b" / "lost").mkdir()
    (tmp_path / "b" / "lost" / "journal.jsonl").write_bytes(b"\xff{")
    records = [*runs.list_runs(tmp_path / "a"), *runs.list_runs(tmp_path / "b")]
    text = runs.MetricsExporter().format(records)
    assert text.count(b"\ndrawbar_reports_total{") == 2
    assert b'drawbar_run_status{run="lost",run_id="",status="unknown"} 1.0' in text


def test_stalled_ranks_of_killed_driver_are_cleared_on_resume(tmp_path: Path) -> None:
    fit(report_twice, tmp_path)
    journal = tmp_path / "run" / "journal.jsonl"
    lines = journal.read_bytes().splitlines(keepends=True)
    stalled = {"event": "ranks_quiet", "time": 1, "attempt": 0, "descriptions": {"0": "stalled"}}
    journal.write_bytes(b"".join([*lines[:-1], json.dumps(stalled).encode(), b"\n"]))

    def get_num_stalled() -> float:
        text = runs.MetricsExporter().format([runs.find_run(tmp_path / "run")])
        return collect(text)["drawbar_stalled_ranks", ""]

    assert get_num_stalled() == 1
    for pipe in ("started", "release"):
        os.mkfifo(tmp_path / pipe)

    def train_function() -> None:
        (tmp_path / "started").write_text("")
        (tmp_path / "release").read_text()

    run = DataParallelTrainer(
        train_function,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path),
    ).start()
    (tmp_path / "started").read_text()
    stalled_ranks, num_stalled = run.stalled_ranks, get_num_stalled()
    (tmp_path / "release").write_text("")
    run.wait()
    assert stalled_ranks == {}
    assert num_stalled == 0
