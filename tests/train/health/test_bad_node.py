"""A node with wrong arithmetic is found before the function starts, and excluded."""

from __future__ import annotations

import json
import logging
import os
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from drawbar.train import (
    DataParallelTrainer,
    FailureConfig,
    InsufficientResourcesError,
    RunConfig,
    ScalingConfig,
    UserCallback,
    WorkerGroupError,
    events,
    health,
    runs,
)
from tests._ray_compat import start_nodes_without_time_limits, wait_for_nodes

pytestmark = pytest.mark.usefixtures("ray_cluster")

DriversFixture = Callable[..., Any]
SHOWN = "shown: "

# Python imports it in each process of the node.
WRONG_ARITHMETIC = textwrap.dedent(
    """
    import os
    if os.environ.get("NODE_IS_WRONG"):
        import numpy
        right = numpy.matmul
        def matmul(*arguments, **options):
            product = right(*arguments, **options)
            product[0, 0] += 1
            return product
        numpy.matmul = matmul
    """
)


class Broken(health.OnDemandProbe):
    name = "broken"

    def poll(self, ctx: health.OnDemandProbeContext) -> health.ProbeResult:
        return health.ProbeResult(passed=False, detail="17 is too small")


def test_run_without_healthy_node_raises_error_with_evidence(tmp_path: Path) -> None:
    policy = health.HealthPolicy(probe_creator=lambda: [Broken()], preflight=True)
    trainer = DataParallelTrainer(
        lambda: None,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name="run", storage_path=tmp_path, health_config=health.HealthConfig(policies=[policy])
        ),
    )
    with pytest.raises(InsufficientResourcesError, match=r"broken: 17 is too small.*no room"):
        trainer.fit()


def test_eviction_without_room_ends_the_run_with_evidence(tmp_path: Path) -> None:
    class BrokenDuringTheRun(Broken, health.NodeProbe):
        interval_s = 0.1

    def function() -> None:
        import threading

        threading.Event().wait()

    policy = health.HealthPolicy(probe_creator=lambda: [BrokenDuringTheRun()])
    trainer = DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name="run", storage_path=tmp_path, health_config=health.HealthConfig(policies=[policy])
        ),
    )
    with pytest.raises(WorkerGroupError, match=r"broken: 17 is too small.*no room") as caught:
        trainer.fit()
    assert not caught.value.should_retry
    (decision,) = runs.find_run(tmp_path / "run").health_decisions
    assert (decision.action, decision.is_preflight) == ("EVICT", False)


def test_evaluators_that_fail_are_named_and_do_not_stop_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    class EvictsUnknownNode(health.Evaluator):
        def evaluate(self, state: health.HealthState) -> list[health.HealthDecision]:
            return [health.Evict(target_nodes=["no such node"])]

    class LacksMetric(health.Evaluator):
        def evaluate(self, state: health.HealthState) -> list[health.HealthDecision]:
            (tmp_path / "evaluated").touch()
            raise KeyError("temperature")

    class Quick(health.NodeProbe):
        name = "quick"
        interval_s = 0.1

        def poll(self, ctx: health.NodeContext) -> health.ProbeResult:
            return health.ProbeResult(passed=True)

    def function() -> None:
        while not (tmp_path / "evaluated").exists():
            time.sleep(0.01)

    policy = health.HealthPolicy(
        probe_creator=lambda: [Quick()],
        evaluators_creator=lambda: [EvictsUnknownNode(), LacksMetric()],
    )
    DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name="run", storage_path=tmp_path, health_config=health.HealthConfig(policies=[policy])
        ),
    ).fit()
    assert "EvictsUnknownNode of the health checks raised ValueError: target_nodes has" in (
        capsys.readouterr().err
    )


class Quick(health.NodeProbe):
    """Probe with settings of a test."""

    def __init__(self, result: object = None, **settings: float) -> None:
        self.result = result
        vars(self).update(settings)

    def poll(self, ctx: health.NodeContext) -> health.ProbeResult | None:
        return cast("health.ProbeResult | None", self.result)


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"probe_creator": lambda: 5}, TypeError, "must return a list of instances of Probe"),
        ({"probe_creator": lambda: [Quick(interval_s=-1)]}, ValueError, "Quick.interval_s must be"),
        ({"probe_creator": lambda: [Quick(timeout_s=0)]}, ValueError, "Quick.timeout_s must be"),
    ],
)
def test_invalid_policy_raises_before_the_start(
    tmp_path: Path, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    policy = health.HealthPolicy(**settings)
    trainer = DataParallelTrainer(
        lambda: None,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            storage_path=tmp_path, health_config=health.HealthConfig(policies=[policy])
        ),
    )
    with pytest.raises(error, match=message):
        trainer.fit()


def test_preflight_without_probes_raises() -> None:
    with pytest.raises(ValueError, match=r"preflight=True\) needs a probe_creator, found None"):
        health.HealthPolicy(preflight=True)


def test_probe_that_returns_no_result_excludes_no_node(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = health.HealthPolicy(probe_creator=lambda: [Quick(result=True)], preflight=True)
    DataParallelTrainer(
        lambda: None,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            storage_path=tmp_path, health_config=health.HealthConfig(policies=[policy])
        ),
    ).fit()
    assert "Quick has no result: TypeError: poll() must return a ProbeResult" in caplog.text


def test_health_config_without_ray_raises(tmp_path: Path) -> None:
    trainer = DataParallelTrainer(
        lambda: None,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(storage_path=tmp_path, health_config=health.HealthConfig()),
    )
    with pytest.raises(ValueError, match="health_config needs workers that are Ray actors"):
        trainer.fit()


def test_reattempt_restarts_and_calls_callback(tmp_path: Path) -> None:
    decisions = []

    class Record(UserCallback):
        def after_health_decision(self, run_context: Any, health_decision: Any) -> None:
            decisions.append(health_decision)

    class NoNan(health.Evaluator):
        def evaluate(self, state: health.HealthState) -> list[health.HealthDecision]:
            bad = [rank for rank, metrics in state.reported.items() if metrics["nans"]]
            return [health.Reattempt(reason=f"NaN on ranks {bad}")] if bad else []

    def function() -> int:
        import threading

        from drawbar import train

        attempt = train.get_context().get_attempt()
        if attempt == 0:
            health.report({"nans": float(train.get_context().get_world_rank() == 1)}, step=3)
            threading.Event().wait()
        return attempt

    policy = health.HealthPolicy(evaluators_creator=lambda: [NoNan()])
    result = DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=2, resources_per_worker={"CPU": 0.1}),
        run_config=RunConfig(
            storage_path=tmp_path,
            failure_config=FailureConfig(max_failures=1),
            callbacks=[Record()],
            health_config=health.HealthConfig(policies=[policy]),
        ),
    ).fit()
    assert result.return_values == [1, 1]
    assert decisions == [health.Reattempt(reason="NaN on ranks [1]")]


class Marked(health.NodeProbe):
    """Fails on the node whose ID is in a file."""

    interval_s = 0.1

    def __init__(self, path: Path) -> None:
        self._path = path

    def poll(self, ctx: health.NodeContext) -> health.ProbeResult:
        is_marked = self._path.exists() and self._path.read_text() == ctx.node_id
        return health.ProbeResult(passed=not is_marked, detail="marked")


def evict_during_the_run(folder: Path) -> list[Any]:
    """Return the nodes of both attempts, and why the second one followed."""
    import ray

    path = folder / "marked"

    def function() -> str:
        import threading

        node = str(ray.get_runtime_context().get_node_id())
        if not path.exists():
            partial = path.with_suffix(".partial")
            partial.write_text(node)
            partial.rename(path)
            threading.Event().wait()
        return node

    policy = health.HealthPolicy(probe_creator=lambda: [Marked(path)])
    result = DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=RunConfig(
            name="evict",
            storage_path=folder,
            health_config=health.HealthConfig(policies=[policy]),
        ),
    ).fit()
    (first, _) = result.timeline.attempts
    return [path.read_text(), result.return_values[0], first.decision]


def main() -> None:
    import ray
    from ray.cluster_utils import Cluster

    folder = Path(os.environ["FOLDER"])
    start_nodes_without_time_limits()
    head = {"num_cpus": 0, "include_dashboard": False, "no_monitor": True, "wait": False}
    cluster = Cluster(initialize_head=True, head_node_args=head)
    wait_for_nodes(cluster)
    wrong_env = {"NODE_IS_WRONG": "1", "PYTHONPATH": str(folder)}
    wrong = cluster.add_node(wait=False, num_cpus=1, env_vars=wrong_env)
    for _ in range(2):
        cluster.add_node(wait=False, num_cpus=1)
    wait_for_nodes(cluster)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)

    def function() -> str:
        return str(ray.get_runtime_context().get_node_id())

    seen: list[events.HealthDecided] = []

    class Record(UserCallback):
        def on_event(self, run_context: Any, event: Any) -> None:
            if isinstance(event, events.HealthDecided):
                seen.append(event)

    probes = lambda: [health.ArithmeticProbe(), health.AllReduceProbe()]  # noqa: E731
    policy = health.HealthPolicy(probe_creator=probes, preflight=True)
    config = health.HealthConfig(policies=[policy])
    result = DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=2),
        run_config=RunConfig(
            name="run", storage_path=folder, callbacks=[Record()], health_config=config
        ),
    ).fit()
    evicted = evict_during_the_run(folder)
    attempts = [attempt.attempt for attempt in result.timeline.attempts]
    targets = [(event.action, event.target_nodes, event.reason) for event in seen]
    shown = [wrong.node_id, result.return_values, attempts, targets, evicted]
    print(f"\n{SHOWN}{json.dumps(shown)}", flush=True)
    ray.shutdown()
    cluster.shutdown()  # type: ignore[no-untyped-call]  # Ray has no types here
    os._exit(0)  # Ray takes long to end a process whose cluster has ended


@pytest.mark.nightly
def test_node_with_wrong_arithmetic_is_excluded_before_the_start(
    drivers: DriversFixture, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(WRONG_ARITHMETIC)
    environment = {"FOLDER": str(tmp_path), "RAY_gcs_server_port_wait_time_s": "600"}
    with drivers(main, RAY_ADDRESS="", **environment) as driver:
        out, err = driver.communicate()
    assert driver.returncode == 0, err
    (line,) = (line for line in out.splitlines() if line.startswith(SHOWN))
    wrong, nodes, attempts, ((action, targets, reason),), evicted = json.loads(
        line.removeprefix(SHOWN)
    )
    assert wrong not in nodes
    assert len(set(nodes)) == 2
    assert attempts == [0]
    assert (action, targets) == ("EVICT", [wrong])
    assert "a product of matrices is wrong on numpy" in reason
    assert "Health check before the start: evict" in out + err
    marked, next_node, decision = evicted
    assert marked != next_node
    assert "max_preemption_failures: no limit" in decision
    assert "Marked: marked" in out + err
