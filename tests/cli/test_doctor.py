"""`drawbar doctor`: what machines tell, what is said of that, and how nodes of a cluster meet."""

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
WELL = MachineInfo(
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


def test_a_machine_that_is_well_has_no_advice() -> None:
    assert {each.advice for each in checks.check_machine(WELL)} == {""}


@pytest.mark.parametrize(
    ("change", "state", "subject", "advice"),
    [
        ({"torch_cuda": None, "torch_gpus": 0}, "problem", "GPUs", "install the torch for"),
        ({"unsupported_gpus": ["B200 (sm_100)"]}, "problem", "GPUs", "get_arch_list"),
        ({"torch_gpus": 0}, "warning", "GPUs", "CUDA_VISIBLE_DEVICES"),
        ({"open_files": 1024}, "warning", "limit of open files", "ulimit -n 8192"),
        ({"processes": 512}, "warning", "limit of processes", "ulimit -u 4096"),
        ({"shared_memory": (60 * 10**6, 64 * 10**6)}, "warning", "/dev/shm", "--shm-size"),
        ({"disks": {"storage path": (GB, 100 * GB)}}, "warning", "disk of storage path", "free"),
    ],
)
def test_each_ill_is_named_with_what_to_do(
    change: dict[str, object], state: str, subject: str, advice: str
) -> None:
    found = [each for each in checks.check_machine(replace(WELL, **change)) if each.status != "ok"]  # type: ignore[arg-type]
    (ill,) = found
    assert (ill.status, ill.subject, ill.node) == (state, subject, "a")
    assert advice in ill.advice


def test_versions_and_clocks_are_compared() -> None:
    other = replace(WELL, host="b", packages={"ray": "2.59.0", "torch": "2.9.0"})
    ills = [
        each for each in checks.check_consistency([WELL, other], [0.0, -9.0]) if each.status != "ok"
    ]
    assert [each.subject for each in ills] == ["ray", "clock"]
    assert ills[0].value == "2.60.0 on a, 2.59.0 on b"
    assert ills[1].value == "-9.00 s"


def test_this_machine_is_looked_at_without_ray(drawbar: Command, tmp_path: Path) -> None:
    told = drawbar("doctor", "--storage", tmp_path, "--all")
    *lines, counted = told.out.splitlines()
    assert any(f"GPUs ({socket.gethostname()}): " in line for line in lines)
    assert any("disk of storage path" in line for line in lines)
    assert counted.endswith(" problems")
    assert told.code == any(line.startswith("problem") for line in lines)


@pytest.mark.usefixtures("ray_cluster")
def test_a_cluster_is_looked_at_and_pairs_of_nodes_meet(drawbar: Command, tmp_path: Path) -> None:
    storage = tmp_path / "not" / "yet"
    told = drawbar("doctor", "--address", "auto", "--storage", storage, "--json")
    found = {each["subject"]: each for each in json.loads(told.out)}
    assert found["storage path"]["value"] == f"{storage} is shared"
    assert found["clock"]["state"] == "ok"
    assert list(tmp_path.iterdir()) == []
    pair = {name: ray.remote(NodeProbe).options(num_cpus=0).remote() for name in ("a", "b")}
    (well,) = check_node_pairs(pair, "gloo")
    assert (well.status, well.node) == ("ok", "a and b")
    assert float(well.value.split()[0]) > 0
    (ill,) = check_node_pairs(pair, "nothing")
    assert (ill.status, "SOCKET_IFNAME" in ill.advice) == ("problem", True)


def test_a_cluster_that_is_not_there_is_one_line(drawbar: Command) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        told = drawbar("doctor", "--address", f"127.0.0.1:{closed.getsockname()[1]}")
    *more, line = told.err.splitlines()
    assert line.startswith("drawbar: there is no Ray cluster at")
    assert (told.code, "Traceback" in str(more)) == (2, False)
