"""CPUs of ranks with `--numa-binding`, for a machine that the test describes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from drawbar.launch._numa import Topology, parse_cpu_list, select_cpus

GPU_NODES = {"0000:1b:00.0": 0, "0000:3d:00.0": 0, "0000:9a:00.0": 1, "0000:c1:00.0": -1}


def make_topology(root: Path, cpus: Mapping[int, str], **options: frozenset[int]) -> Topology:
    """Describe a machine with two threads per core, and an L3 cache for each two cores.

    Args:
        root: Directory of the description.
        cpus: CPUs of each NUMA node. Each node is a socket, except that node 1 belongs to socket 0.
        options: `allowed_cpus`.
    """
    sys, proc = root / "sys", root / "proc"
    for node, text in cpus.items():
        write(sys / f"devices/system/node/node{node}/cpulist", text)
        for cpu in parse_cpu_list(text):
            directory = sys / f"devices/system/cpu/cpu{cpu}"
            core, cache = cpu - cpu % 2, cpu - cpu % 4
            write(directory / "topology/physical_package_id", str(0 if node == 1 else node))
            write(directory / "topology/thread_siblings_list", f"{core}-{core + 1}")
            write(directory / "cache/index0/level", "1")
            write(directory / "cache/index0/shared_cpu_list", f"{core}-{core + 1}")
            write(directory / "cache/index3/level", "3")
            write(directory / "cache/index3/shared_cpu_list", f"{cache}-{cache + 3}")
    for number, (address, gpu_node) in enumerate(GPU_NODES.items()):
        write(proc / f"driver/nvidia/gpus/{address}/information", f"GPU UUID: \t GPU-{number}a\n")
        write(sys / f"bus/pci/devices/{address}/numa_node", f"{gpu_node}\n")
    return Topology(sys, proc, options.get("allowed_cpus", parse_cpu_list(",".join(cpus.values()))))


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("node", ["0-7", "0-7", "8-15", "0-7"]),
        ("socket", ["0-15", "0-15", "0-15", "0-15"]),
        ("exclusive", ["0-1", "2-3", "8-15", "4-7"]),
        ("core-complex", ["0-3", "4-7", "8-11", "0-3"]),
    ],
)
def test_select_cpus_of_gpus(tmp_path: Path, mode: str, expected: list[str]) -> None:
    topology = make_topology(tmp_path, {0: "0-7", 1: "8-15", 2: "16-19"})
    gpus = ["0", "GPU-1a", "2", "3"]  # the node of GPU 3 is unknown
    selected = [select_cpus(mode, gpus, rank, topology) for rank in range(4)]
    assert selected == [parse_cpu_list(text) for text in expected]


def test_select_cpus_of_ranks_without_gpus_uses_all_nodes(tmp_path: Path) -> None:
    allowed = frozenset({1, 2, 3, 8, 9, 10})
    topology = make_topology(tmp_path, {0: "0-3", 1: "4-7", 2: "8-11"}, allowed_cpus=allowed)
    ranks = ["", "", "", ""]
    selected = [select_cpus("node", ranks, rank, topology) for rank in range(4)]
    assert selected == [{1, 2, 3}, {1, 2, 3}, {8, 9, 10}, {8, 9, 10}]
    with pytest.raises(ValueError, match="NUMA node 0 has 2 cores for 3 ranks"):
        select_cpus("exclusive", [""] * 6, 0, topology)


def test_select_cpus_of_unknown_gpu_raises(tmp_path: Path) -> None:
    topology = make_topology(tmp_path, {0: "0-3"})
    with pytest.raises(ValueError, match="needs the PCI address of GPU 9, which is not in"):
        select_cpus("node", ["9"], 0, topology)
