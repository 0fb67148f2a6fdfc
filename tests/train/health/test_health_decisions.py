"""Decisions of the health checks, without Ray."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from drawbar._base.node_resources import NodeResources
from drawbar._health_manager.evaluation import merge_decisions
from drawbar._health_manager.health_manager import list_candidates
from drawbar._health_manager.node_monitors import find_failed_pairs
from drawbar._records.events import HealthDecided
from drawbar.train import RunConfig, ScalingConfig, health


def make_context() -> health.NodeContext:
    return health.NodeContext("n", "host", is_preflight=True)


def test_merge_takes_most_severe_decision_and_unites_its_nodes() -> None:
    first = health.Evict(health.Cause.HARDWARE, "hot", ["a"])
    second = health.Evict(reason="slow", target_nodes=["b", "a"])
    merged = merge_decisions([health.Noop(), first, health.Reattempt(reason="NaN"), second])
    assert merged == health.Evict(health.Cause.HARDWARE, "hot; slow", ["a", "b"])


def test_merge_unites_diagnoses_and_ignores_noop() -> None:
    probe = health.AllReduceProbe()
    first = health.Diagnose(on_demand_probes=[probe], target_ranks=[1])
    merged = merge_decisions([first, health.Diagnose(target_nodes=["a"], reason="slow")])
    assert merged == health.Diagnose(
        reason="slow", on_demand_probes=[probe], target_nodes=["a"], target_ranks=[1]
    )
    assert merge_decisions([health.Noop()]) is None


def test_failed_probe_evaluator_evicts_only_failed_nodes() -> None:
    results = {"a": health.ProbeResult(passed=False, detail="wrong"), "b": health.ProbeResult()}
    state = health.HealthState(probe_results={health.ArithmeticProbe: results})
    (evict,) = health.FailedProbeEvaluator().evaluate(state)
    assert evict == health.Evict(health.Cause.HARDWARE, "arithmetic: wrong", ["a"])


@pytest.mark.parametrize("nodes", ["abcdef", "abcde", "abc"])
@pytest.mark.parametrize("bad", ["a", "b", "c"])
def test_pairs_find_the_bad_node(nodes: str, bad: str) -> None:
    def test(pairs: Sequence[tuple[str, str]]) -> list[health.ProbeResult]:
        used = [node for pair in pairs for node in pair]
        assert len(used) == len(set(used))
        return [health.ProbeResult(passed=bad not in pair) for pair in pairs]

    results = find_failed_pairs(nodes, test)
    assert {node for node in nodes if results[node].passed is False} == {bad}


def test_pairs_of_two_nodes_blame_both() -> None:
    results = find_failed_pairs("ab", lambda pairs: [health.ProbeResult(passed=False)] * len(pairs))
    assert [results[node].passed for node in "ab"] == [False, False]


def test_candidates_have_room_and_labels() -> None:
    nodes = [
        NodeResources(node_id="head", hostname="h", total={}),
        NodeResources(node_id="a", hostname="ha", total={"CPU": 4}, labels={"kind": "x"}),
        NodeResources(node_id="b", hostname="hb", total={"CPU": 4}),
        NodeResources(node_id="c", hostname="hc", total={"CPU": 4}, labels={"kind": "x"}),
    ]
    scaling = ScalingConfig(num_workers=1, label_selector={"kind": "x"})
    assert list_candidates(nodes, scaling, {"c"}) == {"a": "ha"}
    assert list(list_candidates(nodes, ScalingConfig(num_workers=1), set())) == ["a", "b", "c"]


def test_builtin_probes_pass_on_this_machine() -> None:
    probes = [health.ArithmeticProbe(), health.MemoryProbe(2**20), health.DiskProbe(0)]
    results = [probe.poll(make_context()) for probe in probes]
    assert [result.passed for result in results if result is not None] == [True, True, True]


@pytest.mark.parametrize(
    ("node_time", "offset"), [(100.0, 0.0), (500.0, 0.0), (40.0, -60.0), (560.0, 60.0)]
)
def test_clock_probe_ignores_the_time_of_a_slow_call(node_time: float, offset: float) -> None:
    measured = health.ProbeResult(metrics={"time": node_time})
    result = health.ClockProbe().judge(measured, sent=100.0, received=500.0)
    assert (result.metrics, result.passed) == ({"offset_s": offset}, offset == 0.0)


def test_arithmetic_probe_finds_one_wrong_element(monkeypatch: pytest.MonkeyPatch) -> None:
    import numpy as np

    right = np.matmul

    def wrong(first: object, second: object) -> object:
        product = right(first, second)  # type: ignore[call-overload]
        product[17, 301] += 1
        return product

    monkeypatch.setattr(np, "matmul", wrong)
    result = health.ArithmeticProbe().poll(make_context())
    assert (result.passed, "numpy" in result.detail) == (False, True)


def test_disk_probe_names_folder_without_space() -> None:
    result = health.DiskProbe(min_free_bytes=math.inf).poll(make_context())
    assert result.passed is False
    assert "GiB of free space" in result.detail


def test_health_decided_has_the_decision() -> None:
    event = HealthDecided(
        time=0.0,
        action="EVICT",
        cause="HARDWARE",
        reason="hot",
        target_nodes=["n"],
        hostnames=["h"],
    )
    assert event.decision == health.Evict(health.Cause.HARDWARE, "hot", ["n"])
    assert event.describe() == "Health check during the run: evict h (n): hot"


def test_wrong_config_raises() -> None:
    with pytest.raises(TypeError, match="probe_creator must be a function"):
        health.HealthPolicy(probe_creator=[health.ArithmeticProbe()])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="a list of HealthPolicy"):
        health.HealthConfig(policies=[1])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="health_config"):
        RunConfig(health_config=health.HealthPolicy())  # type: ignore[arg-type]
