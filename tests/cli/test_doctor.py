"""Tests of `drawbar doctor`."""

from __future__ import annotations

import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest
import ray

from drawbar.cli._doctor import checks
from drawbar.cli._doctor.cluster import NodeProbe, check_node_pairs
from drawbar.cli._doctor.machine import MachineInfo
from tests.cli.conftest import Command

GB = 10**9
MACHINE = MachineInfo(
    host="a",
    python="3.11.7",
    packages={"ray": "2.60.0", "torch": "2.9.0"},
    gpus=["GPU 0: H100"],
    torch_cuda="12.8",
    torch_gpus=1,
    unsupported_gpus=[],
    open_files=65536,
    processes=-1,
    shared_memory=(8 * GB, 8 * GB),
    disks={"temporary files": (50 * GB, 100 * GB)},
)


def test_check_machine_without_problems_gives_no_advice() -> None:
    assert {result.advice for result in checks.check_machine(MACHINE)} == {""}


@pytest.mark.parametrize(
    ("change", "status", "subject", "advice"),
    [
        ({"torch_cuda": None, "torch_gpus": 0}, "error", "GPUs", "Install torch for"),
        ({"unsupported_gpus": ["B200 (sm_100)"]}, "error", "GPUs", "Install a torch build"),
        ({"torch_gpus": 0}, "warning", "GPUs", "CUDA_VISIBLE_DEVICES"),
        ({"open_files": 1024}, "warning", "open files limit", "ulimit -n 8192"),
        ({"processes": 512}, "warning", "processes limit", "ulimit -u 4096"),
        ({"shared_memory": (60 * 10**6, 64 * 10**6)}, "warning", "/dev/shm", "--shm-size"),
        ({"disks": {"storage path": (GB, 100 * GB)}}, "warning", "disk (storage path)", "Free"),
    ],
)
def test_check_machine_reports_each_problem_with_advice(
    change: dict[str, object], status: str, subject: str, advice: str
) -> None:
    results = checks.check_machine(replace(MACHINE, **change))  # type: ignore[arg-type]
    (problem,) = [result for result in results if result.status != "ok"]
    assert (problem.status, problem.subject, problem.node) == (status, subject, "a")
    assert advice in problem.advice


def test_check_consistency_compares_versions_and_clocks() -> None:
    other = replace(MACHINE, host="b", packages={"ray": "2.59.0", "torch": "2.9.0"})
    results = checks.check_consistency([MACHINE, other], [0.0, -9.0])
    problems = [result for result in results if result.status != "ok"]
    assert [problem.subject for problem in problems] == ["ray", "clock"]
    assert problems[0].value == "2.60.0 on a, 2.59.0 on b"
    assert problems[1].value == "9.00 s behind"


def test_doctor_without_address_checks_this_machine(cli: Command, tmp_path: Path) -> None:
    result = cli("doctor", "--storage", tmp_path, "--all")
    *lines, summary = result.out.splitlines()
    assert any(f"GPUs ({socket.gethostname()}): " in line for line in lines)
    assert any("disk (storage path)" in line for line in lines)
    assert summary.endswith(" errors")
    assert result.code == any(line.startswith("error") for line in lines)


@pytest.mark.usefixtures("ray_cluster")
def test_doctor_of_cluster_checks_storage_and_node_pairs(cli: Command, tmp_path: Path) -> None:
    storage = tmp_path / "not" / "yet"
    result = cli("doctor", "--address", "auto", "--storage", storage, "--json")
    checks_by_subject = {check["subject"]: check for check in json.loads(result.out)}
    assert checks_by_subject["storage path"]["value"] == f"{storage} is shared"
    assert checks_by_subject["clock"]["status"] == "ok"
    assert list(tmp_path.iterdir()) == []
    pair = {name: ray.remote(NodeProbe).options(num_cpus=0).remote() for name in ("a", "b")}
    (passed,) = check_node_pairs(pair, "gloo")
    assert (passed.status, passed.node) == ("ok", "a and b")
    assert float(passed.value.split()[0]) > 0
    (failed,) = check_node_pairs(pair, "nothing")
    assert (failed.status, "SOCKET_IFNAME" in failed.advice) == ("error", True)


def test_doctor_of_unreachable_cluster_prints_one_line(cli: Command) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # bound, but not listening
        result = cli("doctor", "--address", f"127.0.0.1:{closed.getsockname()[1]}")
    *others, line = result.err.splitlines()
    assert line.startswith("drawbar: error: Cannot connect to a Ray cluster at")
    assert (result.code, "Traceback" in str(others)) == (2, False)
