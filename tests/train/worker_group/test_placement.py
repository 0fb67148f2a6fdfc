"""Placement of workers: capacity checks, which reject groups that can never fit, and ranks."""

import contextlib
import json
import os
import signal
import threading
import warnings
from pathlib import Path

import msgspec
import psutil
import pytest

from drawbar import train
from drawbar._base.node_resources import NodeResources, describe_missing_resources, matches_selector
from drawbar._process.errors import InsufficientResourcesError
from drawbar._process.rank_assignment import assign_ranks
from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar.train._config.scaling_config import PlacementStrategy, ScalingConfig
from drawbar.train._worker_group.capacity import check_group_fits
from drawbar.train._worker_group.cluster import (
    can_autoscale,
    has_launchable_node_types,
    list_node_resources,
)
from drawbar.train._worker_group.placement import Placement
from tests.train.runs import fit


def node(name: str, labels: dict[str, str] | None = None, /, **total: float) -> NodeResources:
    return NodeResources(
        node_id=name, hostname=name, total=total, available=total, labels=labels or {}
    )


def make_scaling(
    workers: int,
    bundle: dict[str, float],
    strategy: PlacementStrategy = "PACK",
    selectors: list[dict[str, str]] | None = None,
) -> ScalingConfig:
    return ScalingConfig(
        num_workers=workers,
        use_gpu="GPU" in bundle,
        use_tpu="TPU" in bundle,
        resources_per_worker=bundle,
        placement_strategy=strategy,
        label_selector=selectors,
    )


SMALL, LARGE = node("small", {"zone": "a"}, CPU=2), node("large", {"zone": "b"}, CPU=8, GPU=2)


@pytest.mark.parametrize(
    ("workers", "bundle", "strategy"),
    [
        (10, {"CPU": 1}, "PACK"),
        (8, {"CPU": 1}, "STRICT_PACK"),
        (2, {"CPU": 2}, "STRICT_SPREAD"),
        (4, {"GPU": 0.5}, "SPREAD"),
        (20, {"GPU": 0.1}, "SPREAD"),
        (1, {"CPU": 8, "GPU": 2}, "PACK"),
        (99, {}, "PACK"),
        (0, {"TPU": 1}, "PACK"),
    ],
)
def test_check_group_fits_accepts_fitting_group(
    workers: int, bundle: dict[str, float], strategy: PlacementStrategy
) -> None:
    check_group_fits([SMALL, LARGE], make_scaling(workers, bundle, strategy))


@pytest.mark.parametrize(
    ("workers", "bundle", "strategy", "message"),
    [
        (1, {"CPU": 50}, "PACK", r"CPU=50, but the largest node \(host large, of 2 .*\) has CPU=8"),
        (1, {"CPU": 9, "GPU": 1}, "PACK", r"CPU=9, GPU=1, .*\(host large, .*\) has CPU=8, GPU=2"),
        (11, {"CPU": 1}, "PACK", r"11 workers of CPU=1 cannot fit .* at most 10 fit on the whole"),
        (11, {"CPU": 1}, "PACK", r"workers per host: small: 2, large: 8"),
        (10**11, {"CPU": 1}, "PACK", r"100000000000 workers of CPU=1 cannot fit .* at most 10 fit"),
        (4, {"CPU": 3}, "SPREAD", "at most 2 fit"),
        (5, {"GPU": 0.4}, "PACK", "at most 4 fit"),
        (
            9,
            {"CPU": 1},
            "STRICT_PACK",
            "placement_strategy='STRICT_PACK': at most 8 fit on one node",
        ),
        (3, {"CPU": 1}, "STRICT_SPREAD", "at most 2 fit with one worker per node"),
        (2, {"CPU": 3}, "STRICT_SPREAD", "at most 1 fit with one worker per node"),
        (1, {"TPU": 1}, "PACK", "no node of this cluster has the resource 'TPU'.*: CPU, GPU$"),
    ],
)
def test_check_group_fits_rejects_oversized_group(
    workers: int, bundle: dict[str, float], strategy: PlacementStrategy, message: str
) -> None:
    with pytest.raises(InsufficientResourcesError, match=message):
        check_group_fits([SMALL, LARGE], make_scaling(workers, bundle, strategy))


def test_check_group_fits_computes_fractions_exactly() -> None:
    check_group_fits([node("n", CPU=0.3)], make_scaling(3, {"CPU": 0.1}))


def test_check_group_fits_formats_memory_in_gib() -> None:
    nodes = [node("n", memory=2.0 * 2**30)]
    with pytest.raises(InsufficientResourcesError, match=r"memory=4.0 GiB, .* memory=2.0 GiB"):
        check_group_fits(nodes, make_scaling(1, {"memory": 4.0 * 2**30}))


def test_check_group_fits_without_nodes_raises() -> None:
    with pytest.raises(InsufficientResourcesError, match="no live node"):
        check_group_fits([], make_scaling(1, {"CPU": 1}))


@pytest.mark.parametrize(
    ("selectors", "strategy", "message"),
    [
        ([{"zone": "c"}], "PACK", r"matches none .* 2 nodes\. Existing values: zone: a, b"),
        ([{"tier": "x"}], "PACK", "Existing values: tier: none"),
        (
            [{"zone": "a"}] * 3,
            "PACK",
            r"3 workers .* label_selector={'zone': 'a'} .* at most 2 fit",
        ),
        ([{"zone": "a"}, {"zone": "b"}], "STRICT_PACK", "at most 0 fit on one node"),
        ([{"zone": "a"}, *[{"zone": "b"}] * 9], "PACK", r"9 workers .*'zone': 'b'.* at most 8"),
    ],
)
def test_check_group_fits_rejects_unmatched_selectors(
    selectors: list[dict[str, str]], strategy: PlacementStrategy, message: str
) -> None:
    scaling = make_scaling(len(selectors), {"CPU": 1}, strategy, selectors)
    with pytest.raises(InsufficientResourcesError, match=message):
        check_group_fits([SMALL, LARGE], scaling)


def test_check_group_fits_accepts_selectors_per_worker() -> None:
    selectors = [{"zone": "a"}] * 2 + [{"zone": "!a"}] * 8
    check_group_fits([SMALL, LARGE], make_scaling(10, {"CPU": 1}, selectors=selectors))


@pytest.mark.parametrize(
    ("condition", "matching"),
    [
        ("a", {"a"}),
        ("!a", {"b", None}),
        ("in(a, b)", {"a", "b"}),
        ("in(b)", {"b"}),
        ("!in(a,b)", {None}),
    ],
)
def test_matches_selector_supports_ray_syntax(condition: str, matching: set[str | None]) -> None:
    nodes: dict[str | None, dict[str, str]] = {"a": {"zone": "a"}, "b": {"zone": "b"}, None: {}}
    assert {
        k for k, labels in nodes.items() if matches_selector(labels, {"zone": condition})
    } == matching


def test_label_selector_is_sent_to_ray_without_spaces() -> None:
    scaling = make_scaling(1, {"CPU": 1}, selectors=[{"zone": "!in(b, a)"}])
    assert scaling.label_selectors == [{"zone": "!in(b,a)"}]


@pytest.mark.parametrize(
    ("num_workers", "amount", "fits"), [(3, 0.3334, True), (3, 0.3335, False), (2, 0.5001, False)]
)
def test_check_group_fits_has_tolerance_of_ray(num_workers: int, amount: float, fits: bool) -> None:
    rejected = pytest.raises(InsufficientResourcesError)
    with contextlib.nullcontext() if fits else rejected:
        check_group_fits([node("a", CPU=1)], make_scaling(num_workers, {"CPU": amount}))


def test_describe_missing_resources_with_zero_cpus() -> None:
    line = describe_missing_resources([SMALL], {"CPU": 0}, 1)
    assert "free are CPU=2 on 1 node, room for 1 worker: Ray is placing" in line


def test_describe_missing_resources_lists_free_resources() -> None:
    nodes = [
        NodeResources(node_id=name, hostname=name, total={"CPU": 4}, available={"CPU": free})
        for name, free in [("a", 1), ("b", 2)]
    ]
    assert describe_missing_resources(nodes, {"CPU": 2}, 2) == (
        "waiting for CPU=4 (2 workers of CPU=2); free are CPU=3 on 2 nodes, room for 1 worker"
    )


@pytest.mark.parametrize(
    ("node_types", "expected"),
    [
        ({}, False),
        ({"node_" + "0f" * 28: 1}, False),  # what Ray 2.60 shows for nodes that it did not launch
        ({"ray.head.default": 1}, True),
        ({"node_" + "0f" * 28: 1, "gpu-workers": 2}, True),
    ],
)
def test_has_launchable_node_types_reads_status(node_types: dict[str, int], expected: bool) -> None:
    status = {"load_metrics_report": {}, "autoscaler_report": {"active_nodes": node_types}}
    assert has_launchable_node_types(json.dumps(status).encode()) is expected


@pytest.mark.usefixtures("ray_cluster")
def test_list_node_resources_of_real_cluster() -> None:
    (only,) = list_node_resources()
    assert only.total["CPU"] == 8
    assert only.total["GPU"] == 4
    assert only.labels["ray.io/node-id"] == only.node_id
    assert not can_autoscale()
    with pytest.raises(InsufficientResourcesError, match=f"host {only.hostname}.* has CPU=8"):
        check_group_fits([only], make_scaling(1, {"CPU": 50}))


def test_placement_release_with_suspended_gcs_returns(
    ray_cluster: None,
) -> None:
    placement = Placement.create(ScalingConfig(num_workers=1))
    (service,) = [child for child in psutil.Process().children() if child.name() == "gcs_server"]
    resume_timer = threading.Timer(10, os.kill, [service.pid, signal.SIGCONT])
    resume_timer.start()
    service.suspend()
    try:
        placement.release()
        assert resume_timer.is_alive()
    finally:
        resume_timer.cancel()
        service.resume()


# -- ranks: sorted by node and GPU, and unchanged if a worker is replaced


def worker(node_id: str, *gpu_ids: str, pid: int = 1) -> WorkerInfo:
    return WorkerInfo(
        node_id=node_id, node_ip="10.0.0.1", hostname="host", pid=pid, gpu_ids=gpu_ids
    )


@pytest.mark.parametrize(
    ("workers", "world_ranks"),
    [
        pytest.param([], [], id="none"),
        pytest.param([worker("a"), worker("a")], [0, 1], id="by slot"),
        pytest.param([worker("a"), worker("b"), worker("a")], [0, 2, 1], id="contiguous per node"),
        pytest.param([worker("b"), worker("a")], [0, 1], id="nodes by first slot, not by name"),
        pytest.param([worker("a", "10"), worker("a", "2")], [1, 0], id="GPU ids are numbers"),
        pytest.param(
            [worker("a", "7", "3"), worker("a", "4", "5")], [0, 1], id="by the lowest GPU"
        ),
        pytest.param([worker("a", "GPU-b"), worker("a", "GPU-a")], [1, 0], id="GPU ids are UUIDs"),
        pytest.param([worker("a"), worker("a", "0")], [1, 0], id="GPUs before none"),
        pytest.param([worker("a", "0"), worker("a", "0")], [0, 1], id="a shared GPU: by slot"),
    ],
)
def test_assign_ranks_sorts_by_node_and_gpu(
    workers: list[WorkerInfo], world_ranks: list[int]
) -> None:
    assert [ranks.world_rank for ranks in assign_ranks(workers)] == world_ranks


def test_assign_ranks_sets_all_six_ranks() -> None:
    ranks = assign_ranks([worker("a"), worker("b"), worker("a")])
    assert ranks[2] == Ranks(
        world_rank=1, world_size=3, local_rank=1, local_world_size=2, node_rank=0, num_nodes=2
    )
    assert ranks[1] == Ranks(
        world_rank=2, world_size=3, local_rank=0, local_world_size=1, node_rank=1, num_nodes=2
    )


@pytest.mark.parametrize("slot", range(4))
def test_assign_ranks_after_replacement_is_unchanged(slot: int) -> None:
    workers = [worker("b", "1"), worker("a", "0"), worker("b", "0"), worker("a", "1")]
    before = assign_ranks(workers)
    workers[slot] = msgspec.structs.replace(workers[slot], pid=99)
    assert assign_ranks(workers) == before


@pytest.mark.usefixtures("ray_cluster")
def test_run_in_a_worker_of_another_run_is_placed_beside_its_group(tmp_path: Path) -> None:
    def inner() -> str:
        return "inner"

    def outer() -> tuple[object, list[str]]:
        # One worker would fit into the bundle of the other rank, which is occupied.
        if train.get_context().get_world_rank() > 0:
            train.collective.barrier()
            return None, []
        with warnings.catch_warnings(record=True) as caught:
            result = fit(
                inner, tmp_path / "inner", num_workers=1, forkserver_preload=["http.server"]
            )
        train.collective.barrier()
        return result.return_value, [str(warning.message) for warning in caught]

    result = fit(outer, tmp_path, num_workers=2, forkserver_preload=["http.server"])
    returned, messages = result.return_value
    assert returned == "inner"
    assert ["called in a forked worker of another run" in message for message in messages] == [True]
