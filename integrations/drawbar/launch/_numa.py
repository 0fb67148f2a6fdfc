"""CPUs near the GPU of a rank, for `--numa-binding`. Reads the topology that Linux publishes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Topology:
    """CPUs, NUMA nodes, and GPUs of a machine.

    Attributes:
        sys: Mount point of sysfs.
        proc: Mount point of procfs.
        allowed_cpus: CPUs that processes may use.
    """

    sys: Path
    proc: Path
    allowed_cpus: frozenset[int]

    def list_nodes(self) -> list[int]:
        """Return the NUMA nodes with CPUs that processes may use."""
        nodes = self.sys.glob("devices/system/node/node[0-9]*")
        numbers = sorted(int(path.name.removeprefix("node")) for path in nodes)
        return [number for number in numbers if self.list_cpus(number)]

    def list_cpus(self, node: int) -> list[int]:
        """Return the CPUs of a NUMA node that processes may use."""
        text = (self.sys / f"devices/system/node/node{node}/cpulist").read_text()
        return sorted(parse_cpu_list(text) & self.allowed_cpus)

    def get_socket(self, cpu: int) -> str:
        """Return an ID of the CPU's socket."""
        return self._read_cpu(cpu, "topology/physical_package_id")

    def get_core(self, cpu: int) -> str:
        """Return an ID of the CPU's physical core."""
        return self._read_cpu(cpu, "topology/thread_siblings_list")

    def get_core_complex(self, cpu: int) -> str:
        """Return an ID of the CPUs with which this CPU shares its largest cache."""
        caches = self.sys.glob(f"devices/system/cpu/cpu{cpu}/cache/index[0-9]*")
        last = max(caches, key=lambda path: int((path / "level").read_text()))
        return (last / "shared_cpu_list").read_text()

    def _read_cpu(self, cpu: int, file: str) -> str:
        return (self.sys / f"devices/system/cpu/cpu{cpu}" / file).read_text()

    def get_node_of_gpu(self, gpu_id: str) -> int:
        """Return the NUMA node of an NVIDIA GPU.

        Args:
            gpu_id: Number or UUID of the GPU, as in CUDA_VISIBLE_DEVICES.

        Raises:
            ValueError: The driver does not list the GPU.
        """
        gpus = sorted((self.proc / "driver/nvidia/gpus").glob("*"))
        found = [gpu for gpu in gpus if gpu_id in (gpu / "information").read_text()]
        if gpu_id.isdecimal():
            found = gpus[int(gpu_id) : int(gpu_id) + 1]
        if not found:
            raise ValueError(
                f"numa_binding needs the PCI address of GPU {gpu_id}, which is not in "
                f"{self.proc}/driver/nvidia/gpus. Remove the setting, or bind the processes in the "
                "script."
            )
        node = int((self.sys / "bus/pci/devices" / found[0].name / "numa_node").read_text())
        # Linux reports -1 on machines with a single node.
        return node if node in self.list_nodes() else self.list_nodes()[0]


def select_cpus(mode: str, gpu_ids: Sequence[str], local_rank: int, topology: Topology) -> set[int]:
    """Return the CPUs of a rank.

    Args:
        mode: One of `MODES`.
        gpu_ids: GPU of each rank on the machine. "" for ranks without a GPU, which are distributed
            over the NUMA nodes.
        local_rank: Rank on the machine.
        topology: The machine.

    Raises:
        ValueError: The driver does not list a GPU.
    """
    nodes = topology.list_nodes()
    node_of_ranks = [
        topology.get_node_of_gpu(gpu_id) if gpu_id else nodes[rank * len(nodes) // len(gpu_ids)]
        for rank, gpu_id in enumerate(gpu_ids)
    ]
    node = node_of_ranks[local_rank]
    neighbors = [rank for rank, other in enumerate(node_of_ranks) if other == node]
    return MODES[mode](topology, node, neighbors.index(local_rank), len(neighbors))


def _bind_to_node(topology: Topology, node: int, index: int, count: int) -> set[int]:
    return set(topology.list_cpus(node))


def _bind_to_socket(topology: Topology, node: int, index: int, count: int) -> set[int]:
    socket = topology.get_socket(topology.list_cpus(node)[0])
    return {cpu for cpu in topology.allowed_cpus if topology.get_socket(cpu) == socket}


def _bind_to_own_cores(topology: Topology, node: int, index: int, count: int) -> set[int]:
    """Divide the cores of a node among its ranks, in contiguous blocks."""
    cores = list(_group(topology.list_cpus(node), topology.get_core).values())
    if len(cores) < count:
        raise ValueError(
            f"numa_binding=exclusive needs a core for each rank, but NUMA node {node} has "
            f"{len(cores)} cores for {count} ranks. Use numa_binding=node."
        )
    block = cores[index * len(cores) // count : (index + 1) * len(cores) // count]
    return {cpu for core in block for cpu in core}


def _bind_to_core_complex(topology: Topology, node: int, index: int, count: int) -> set[int]:
    """Use another core complex for each rank, the ones with most CPUs first."""
    groups = _group(topology.list_cpus(node), topology.get_core_complex).values()
    complexes = sorted(groups, key=lambda cpus: (-len(cpus), cpus))
    return set(complexes[index % len(complexes)])


def _group(cpus: Iterable[int], get_id: Callable[[int], str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for cpu in cpus:
        groups.setdefault(get_id(cpu), []).append(cpu)
    return groups


MODES: Mapping[str, Callable[[Topology, int, int, int], set[int]]] = {
    "node": _bind_to_node,
    "socket": _bind_to_socket,
    "exclusive": _bind_to_own_cores,
    "core-complex": _bind_to_core_complex,
}
"""Functions that select CPUs of a node for the rank with an index among the ranks of the node."""


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a list of CPUs such as `0-3,8`."""
    cpus: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        cpus.update(range(int(low), int(high or low) + 1))
    return frozenset(cpus)
