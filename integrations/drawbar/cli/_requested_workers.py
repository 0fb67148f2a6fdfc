"""Number of workers that the options of `drawbar launch` request."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from drawbar.cli._ray_connection import ClusterSize, num_local_cpus
from drawbar.cli._torchrun import count_processes_per_node, parse_range, resolve_num_workers

if TYPE_CHECKING:
    from drawbar.train import ScalingConfig

_NODE_ID_LABEL = "ray.io/node-id"


@dataclass(frozen=True)
class RequestedWorkers:
    """Number of workers that the options request, which may depend on the cluster."""

    num_workers: str | None
    nproc_per_node: str | None
    nnodes: str | None
    use_gpu: bool | None
    cpus_per_worker: float | None

    @property
    def cpus(self) -> int:
        """Minimum CPUs of a new Ray instance. Like torchrun, allow more processes than cores.

        0 if the options do not name a number of processes per node.
        """
        text = self.nproc_per_node or ""
        return int(text) if text.isdecimal() else 0

    @property
    def nodes(self) -> tuple[int, int]:
        """Minimum and maximum number of nodes."""
        return parse_range("--nnodes", self.nnodes or "1")

    def for_this_node(self) -> RequestedWorkers:
        """Replace the kind of device in `--nproc-per-node` by the number of devices of this node.

        Raises:
            CommandError: There is no such device.
        """
        machine = ClusterSize.of_this_machine()
        return dataclasses.replace(self, nproc_per_node=str(self._count_per_node(machine)))

    @property
    def cpus_of_node(self) -> int:
        """CPUs that the workers of a node reserve. Call `for_this_node` before."""
        return math.ceil(self.cpus * (self.cpus_per_worker or 1.0))

    def _count_per_node(self, cluster: ClusterSize) -> int:
        return count_processes_per_node(
            self.nproc_per_node or "1",
            gpus=cluster.max_gpus_per_node,
            cpus=cluster.max_cpus_per_node,
            is_this_machine=not cluster.uses_ray,
        )

    def to_scaling_config(
        self, cluster: ClusterSize, node_ids: Sequence[str] = ()
    ) -> ScalingConfig:
        """Return the scaling config for a cluster of this size.

        Args:
            cluster: Size of the cluster.
            node_ids: Ray node IDs by node rank. Default: Ray chooses the nodes.
        """
        from drawbar.train import ScalingConfig

        workers: int | tuple[int, int]
        per_node = 0
        if self.nproc_per_node is None and self.nnodes is None:
            low, high = parse_range("--num-workers", self.num_workers or "1")
            workers, is_single_node = (low if low == high else (low, high)), False
        else:
            per_node = self._count_per_node(cluster)
            workers, is_single_node = resolve_num_workers(per_node, self.nnodes or "1")
        max_workers = workers if isinstance(workers, int) else workers[1]
        cpus = self.cpus_per_worker
        if cpus is None and not cluster.uses_ray:
            cpus = _share_cpus(cluster.max_cpus_per_node, num_local_cpus(per_node))
        return ScalingConfig(
            num_workers=workers,
            use_gpu=cluster.gpus >= max_workers if self.use_gpu is None else self.use_gpu,
            resources_per_worker=None if cpus is None else {"CPU": cpus},
            placement_strategy="STRICT_PACK" if is_single_node else "PACK",
            # Ranks follow the node ranks. An elastic run does not know its nodes.
            label_selector=[{_NODE_ID_LABEL: node} for node in node_ids for _ in range(per_node)]
            if isinstance(workers, int) and node_ids
            else None,
        )


def _share_cpus(cores: int, num_processes: int) -> float | None:
    """Return the CPUs of each process if there are more processes than cores, else None."""
    # In ten-thousandths, in which CPUs are counted, and rounded down so that all processes fit.
    return 10_000 * cores // num_processes / 10_000 if num_processes > cores else None
