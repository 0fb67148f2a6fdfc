"""Tests of the resource use and the environment on the page of a run."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from drawbar import ui
from drawbar.train import runs
from tests.ui.conftest import Client, make_run


def make_sample(node: str, time: float, rss: int, cpu: float | None = 50.0) -> runs.ResourceSample:
    return runs.ResourceSample(
        time=time,
        attempt=0,
        rank=0,
        node_rank=0,
        node=node,
        cpu_percent=cpu,
        num_cpus=8,
        memory_total_bytes=2**32 if node == "gpu" else 2**33,
        rss_bytes=rss,
        disk_free_bytes=10**12 - rss,
        gpus=[
            runs.GpuSample(
                index=index,
                utilization_percent=percent,
                memory_used_bytes=2**30,
                memory_total_bytes=2**32,
            )
            for index, percent in enumerate((40, 60) if node == "gpu" else ())
        ],
    )


def read_resources(folder: Path, samples: list[runs.ResourceSample]) -> Any:
    """Return the resources of the run in `folder` after it has received samples."""
    data = b"".join(msgspec.json.encode(sample) + b"\n" for sample in samples)
    (folder / "resources.jsonl").write_bytes(data)
    with ui.start_server([folder], port=0) as server:
        client = Client(server.url)
        return client.get(f"api/runs/{client.find_id('run')}/resources")


@pytest.fixture
def run_folder(ui_storage: Path, tmp_path: Path) -> Path:
    """Return a copy of a finished run."""
    return Path(shutil.copytree(ui_storage / "finished", tmp_path / "run"))


def test_resources_are_shown_for_each_node(run_folder: Path) -> None:
    start = runs.find_run(run_folder).start_time
    assert start is not None
    samples = [make_sample("gpu", start + 1, 100), make_sample("cpu", start + 2, 300, cpu=None)]
    reply = read_resources(run_folder, [*samples, make_sample("gpu", start + 11, 200)])
    charts = {chart["name"]: chart["lines"] for chart in reply["charts"]}
    assert charts["CPU"] == [{"label": "gpu", "x": pytest.approx([1, 11]), "y": [50, 50]}]
    memory = {line["label"]: line["y"] for line in charts["Memory of the run"]}
    assert memory == {"gpu": [100, 200], "cpu": [300]}
    assert [line["y"] for line in charts["GPU, average"]] == [[50, 50]]
    assert [line["y"] for line in charts["GPU memory"]] == [[2**31, 2**31]]
    assert (reply["nodes"], reply["num_nodes"]) == (["gpu", "cpu"], 2)
    limits = {chart["name"]: chart["limit"] for chart in reply["charts"]}
    assert (limits["CPU"], limits["Memory of the run"]) == ("of 8 CPUs", "")


def test_resources_of_long_runs_keep_peaks(run_folder: Path) -> None:
    sizes = [1] * 10_000
    sizes[5_003] = 7
    samples = [make_sample("node", float(time), rss) for time, rss in enumerate(sizes)]
    charts = {chart["name"]: chart for chart in read_resources(run_folder, samples)["charts"]}
    (memory,) = charts["Memory of the run"]["lines"]
    assert len(memory["y"]) <= 400
    assert max(memory["y"]) == 7
    (disk,) = charts["Free disk"]["lines"]
    assert min(disk["y"]) == 10**12 - 7
    assert "GPU memory" not in charts


def test_resources_of_many_nodes_say_how_many_are_shown(run_folder: Path) -> None:
    samples = [make_sample(f"node-{number}", 1.0, 1) for number in range(100)]
    reply = read_resources(run_folder, samples)
    assert (len(reply["nodes"]), reply["num_nodes"]) == (16, 100)
    assert all(len(chart["lines"]) == 16 for chart in reply["charts"])


def test_run_page_has_environment_and_versions(client: Client, ui_storage: Path) -> None:
    page = client.get(f"api/runs/{client.find_id('killed')}")
    assert page["environment"]["command"] == f"-c {ui_storage}"
    assert page["environment"]["directory"] == str(Path.cwd())
    assert page["environment"]["python"] == sys.version.split()[0]
    names = {"command", "directory", "host", "system", "python"}
    assert page["environment"].keys() - {"commit"} == names  # none outside a repository
    assert page["versions"]["ray"] == importlib.metadata.version("ray")
    assert page["versions"]["torch"] == importlib.metadata.version("torch")
    assert page["versions"]["drawbar"] == page["drawbar_version"]


@pytest.mark.skipif(shutil.which("git") is None, reason="Git is not installed")
def test_run_started_in_repository_has_its_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    subprocess.run(["git", "init", "--quiet"], check=True)
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *author, "commit", "--quiet", "--allow-empty", "-m", "x"], check=True)
    make_run(tmp_path, "run", 1)
    head = (tmp_path / ".git" / "HEAD").read_text().removeprefix("ref: ").strip()
    commit = (tmp_path / ".git" / head).read_text().strip()
    assert runs.find_run(tmp_path / "run").environment["commit"] == commit


def test_run_with_odd_git_has_no_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\nprintf '\\377'\ncat\n")
    git.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    make_run(tmp_path, "run", 1)
    assert "commit" not in runs.find_run(tmp_path / "run").environment
