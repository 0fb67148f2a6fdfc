"""Check that the workers leave CPUs for the datasets of a run."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from drawbar._base.node_resources import (
    NodeResources,
    format_resources,
)
from drawbar._base.wording import format_count
from drawbar._process.errors import InsufficientResourcesError
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._worker_group.cluster import can_autoscale, list_node_resources

_PLACEMENT_RELEASE_S = 3.0  # wait for ended Tune trials to release their placement groups


def check_dataset_cpus(scaling: ScalingConfig, streamed_datasets: Sequence[str]) -> None:
    """Reject workers that leave no CPU for datasets. See `check_cpus_for_datasets`."""
    if streamed_datasets and scaling.max_workers and not can_autoscale():
        check_cpus_for_datasets(list_node_resources(), scaling, streamed_datasets)


def check_unreserved_dataset_cpus(streamed_datasets: Sequence[str]) -> None:
    """Reject datasets for which placement groups leave no CPU. See `check_unreserved_cpus`.

    Waits up to `_PLACEMENT_RELEASE_S` for a CPU, because a Tune trial that has just ended may still
    hold its placement group.
    """
    deadline = time.monotonic() + _PLACEMENT_RELEASE_S
    while streamed_datasets and not can_autoscale():
        try:
            check_unreserved_cpus(list_node_resources(), _count_reserved_cpus(), streamed_datasets)
        except InsufficientResourcesError:
            if time.monotonic() > deadline:
                raise
            time.sleep(_PLACEMENT_RELEASE_S / 10)
        else:
            return


def _count_reserved_cpus() -> float:
    from ray.util import placement_group_table

    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    bundles = [bundle for group in groups for bundle in group["bundles"].values()]
    return float(sum(bundle.get("CPU", 0.0) for bundle in bundles))


def get_remaining_resources(reserved: Mapping[str, float]) -> dict[str, float]:
    """Return how many CPUs and GPUs of the cluster the workers leave unreserved.

    Args:
        reserved: Resources that the workers reserve.

    Returns:
        CPUs and GPUs. Empty if `reserved` is empty or the cluster can autoscale.
    """
    if not reserved or can_autoscale():
        return {}
    nodes = list_node_resources()
    total = {name: sum(node.total.get(name, 0.0) for node in nodes) for name in ("CPU", "GPU")}
    return {name: max(amount - reserved.get(name, 0.0), 0.0) for name, amount in total.items()}


def check_cpus_for_datasets(
    nodes: Sequence[NodeResources], scaling: ScalingConfig, streamed_datasets: Sequence[str]
) -> None:
    """Reject workers that take the CPUs with which their datasets are computed.

    Ray Data reads and transforms in tasks of one CPU each, outside the placement group of the
    workers. If the workers hold every CPU, the tasks wait for the workers to end, and the workers
    wait for their data.

    Args:
        nodes: Live nodes.
        scaling: Resources and maximum number of the workers.
        streamed_datasets: Names of the datasets that are computed while they are read.

    Raises:
        InsufficientResourcesError: Less than one CPU remains, even if everything else is free.
    """
    total = sum(node.total.get("CPU", 0) for node in nodes)
    remaining = total - scaling.total_resources.get("CPU", 0)
    if remaining < 1:
        workers = format_count(scaling.max_workers, "worker")
        usage = f"{workers} of {format_resources(scaling.bundle)} leave CPU={max(remaining, 0):g}"
        raise _make_no_cpu_error(usage, total, streamed_datasets, "Lower")


def check_unreserved_cpus(
    nodes: Sequence[NodeResources], reserved: float, streamed_datasets: Sequence[str]
) -> None:
    """Reject workers if the placement groups of all runs leave no CPU for their datasets.

    Each run may leave a CPU, but all of them together none. Then their workers wait for data, and
    the data waits for a CPU that is never released.

    Args:
        nodes: Live nodes.
        reserved: CPUs in placement groups, including the groups of these workers.
        streamed_datasets: Names of the datasets that are computed while they are read.

    Raises:
        InsufficientResourcesError: Less than one CPU is outside placement groups.
    """
    total = sum(node.total.get("CPU", 0) for node in nodes)
    if total - reserved < 1:
        groups = "placement groups of these workers and of other runs or trials"
        usage = f"{groups} hold CPU={reserved:g}"
        option = "tune.TuneConfig(max_concurrent_trials=...)"
        remedy = f"Run fewer trials or runs at a time ({option}), lower"
        raise _make_no_cpu_error(usage, total, streamed_datasets, remedy)


def _make_no_cpu_error(
    usage: str, total: float, streamed_datasets: Sequence[str], remedy: str
) -> InsufficientResourcesError:
    names = ", ".join(f"datasets[{name!r}]" for name in streamed_datasets)
    return InsufficientResourcesError(
        f"{usage} of the cluster's CPU={total:g}, but Ray Data needs at least one CPU to execute "
        f"{names}. The workers would wait for their data forever. {remedy} "
        "ScalingConfig.num_workers or resources_per_worker, add CPUs, or materialize datasets "
        "that fit into memory before fit()"
    )
