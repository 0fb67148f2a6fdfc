"""`HealthManager`: runs the probes of a run, and turns the decisions of evaluators into actions."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from drawbar._base.node_resources import (
    NodeResources,
    count_fitting_bundles,
    matches_selector,
)
from drawbar._health.decisions import Diagnose, Evaluator, Evict, HealthDecision
from drawbar._health.health_config import HealthPolicy
from drawbar._health.probes import HealthState, NodeProbe, Probe
from drawbar._health_manager.evaluation import FailedProbeEvaluator, merge_decisions
from drawbar._health_manager.node_monitors import NodeMonitors
from drawbar._health_manager.report import HEALTH
from drawbar._process.errors import InsufficientResourcesError
from drawbar._process.ranks import WorkerInfo
from drawbar._records.event_stream import Emit
from drawbar._records.events import HealthDecided
from drawbar._records.live_events import Event, Notice, ObservationReceived
from drawbar.train._config.run_config import RunConfig
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._controller.run import OpenRun
from drawbar.train._worker_group.cluster import list_node_resources

_MIN_EVALUATION_S = 1.0
"""Evaluators run at most once in this time after calls of `health.report()`."""

_logger = logging.getLogger("drawbar.train")

NO_ROOM = (
    "The other healthy nodes have no room for the workers. Repair the node, add another one, lower "
    "ScalingConfig.num_workers, or remove the probe from RunConfig.health_config"
)

Act = Callable[[HealthDecision], None]


@dataclass
class _Policy:
    """A policy with its probes and evaluators, which live as long as the run."""

    probes: Sequence[Probe]
    evaluators: Sequence[Evaluator]
    is_preflight: bool

    @classmethod
    def of(cls, policy: HealthPolicy) -> _Policy:
        probes = policy.probe_creator() if policy.probe_creator is not None else []
        create = policy.evaluators_creator or (lambda: [FailedProbeEvaluator()])
        evaluators = create()
        for name, found, kind in (
            ("probe_creator", probes, Probe),
            ("evaluators_creator", evaluators, Evaluator),
        ):
            if not isinstance(found, Sequence) or not all(isinstance(each, kind) for each in found):
                raise TypeError(
                    f"HealthPolicy.{name} must return a list of instances of {kind.__name__}, "
                    f"found {found!r}"
                )
        for probe in probes:
            seconds = {"timeout_s": probe.timeout_s}
            if isinstance(probe, NodeProbe):
                seconds["interval_s"] = probe.interval_s
            for name, value in seconds.items():
                if value <= 0:
                    raise ValueError(
                        f"{type(probe).__name__}.{name} must be above 0 seconds, found {value!r}"
                    )
        return cls(list(probes), list(evaluators), policy.preflight)


class HealthManager:
    """Checks the nodes of one run. It is a watcher, because it needs the reports of ranks.

    Args:
        run_config: Configuration of the run, with a `health_config`.
        scaling: The workers.
    """

    def __init__(self, run_config: RunConfig, scaling: ScalingConfig) -> None:
        assert run_config.health_config is not None
        # At the user's line, because the functions are the user's.
        self._policies = [_Policy.of(policy) for policy in run_config.health_config.policies]
        self._runtime_env = run_config.worker_runtime_env
        self._scaling = scaling
        self._evicted: set[str] = set()
        self._failed_evaluators: list[Evaluator] = []
        self._state = HealthState()
        self._lock = threading.Lock()
        self._wake_up = threading.Event()
        self._closed = threading.Event()
        self._monitors: NodeMonitors | None = None
        self._node_probes: list[NodeProbe] = []
        self._due: list[float] = []
        for policy in self._policies:
            for probe in policy.probes:
                if isinstance(probe, NodeProbe):
                    self._node_probes.append(probe)
                    # A probe that has run before the start is not repeated at once.
                    wait = probe.interval_s if policy.is_preflight else 0.0
                    self._due.append(time.monotonic() + wait)
        self._act: Act | None = None
        self._thread: threading.Thread | None = None

    def watch(self, run: OpenRun, emit: Emit) -> HealthManager:
        """Return this object as a watcher of a run, to which it emits events."""
        self._storage_path, self._emit = run.directory.uri, emit
        return self

    def on_event(self, event: Event) -> None:
        """Store what `health.report()` has sent."""
        if isinstance(event, ObservationReceived) and event.kind == HEALTH:
            metrics = {name: float(value) for name, value in event.payload["metrics"].items()}
            with self._lock:
                self._state.reported[event.rank] = metrics
                self._state.steps[event.rank] = event.payload["step"]
            self._wake_up.set()

    def close(self) -> None:
        """Stop the probes."""
        self._closed.set()
        self._wake_up.set()
        if self._thread is not None:
            self._thread.join(timeout=2.0)

    # -- before a start

    def use_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        """Emit events on the event loop of the controller, as everything else does."""
        self._call_in_loop = loop.call_soon_threadsafe

    def check_nodes(self, exclude_node: Callable[[str], bool]) -> None:
        """Run the probes before a start, and exclude nodes until all others are healthy.

        Args:
            exclude_node: Excludes a node. Returns False if the other nodes have no room.

        Raises:
            InsufficientResourcesError: Too few nodes are healthy.
        """
        policies = [policy for policy in self._policies if policy.is_preflight]
        nodes = list_candidates(list_node_resources(), self._scaling, self._evicted)
        if not policies or not nodes:
            return
        monitors = NodeMonitors(nodes, self._storage_path, self._runtime_env, is_preflight=True)
        evictions: list[HealthDecision] = []
        try:
            for policy in policies:
                state = HealthState(hostnames=dict(nodes))
                for probe in policy.probes:
                    state.probe_results[type(probe)] = monitors.run(probe)
                found = [d for each in policy.evaluators for d in each.evaluate(state)]
                evictions += [decision for decision in found if isinstance(decision, Evict)]
        finally:
            monitors.close()
        reasons: dict[str, list[str]] = {}
        for eviction in evictions:
            assert isinstance(eviction, Evict)
            for node in eviction.target_nodes:
                reasons.setdefault(node, []).append(eviction.reason)
        for node, texts in reasons.items():
            self._evict_before_start(merge_evictions(evictions, node, texts), nodes, exclude_node)

    def _evict_before_start(
        self, decision: Evict, nodes: Mapping[str, str], exclude_node: Callable[[str], bool]
    ) -> None:
        (node,) = decision.target_nodes
        self._emit_decision(decision, nodes, is_preflight=True)
        self._evicted.add(node)
        if not exclude_node(node):
            raise InsufficientResourcesError(
                f"node {nodes.get(node, node)} ({node[:8]}) failed its health check "
                f"({decision.reason}). {NO_ROOM}"
            )

    def _emit_decision(
        self, decision: HealthDecision, hostnames: Mapping[str, str], *, is_preflight: bool = False
    ) -> None:
        nodes = decision.target_nodes if isinstance(decision, Evict | Diagnose) else []
        event = HealthDecided(
            time=time.time(),
            action=decision.action.name,
            cause=decision.cause.name,
            reason=decision.reason,
            target_nodes=nodes,
            hostnames=[hostnames.get(node, "") for node in nodes],
            is_preflight=is_preflight,
        )
        self._call_in_loop(self._emit, event)

    # -- during a run

    def monitor(self, workers: Sequence[WorkerInfo], act: Act) -> None:
        """Monitor the nodes of an attempt from now on. Returns at once.

        Args:
            workers: Process of each rank, in rank order.
            act: Ends the attempt because of a `Reattempt` or an `Evict`. Called in a thread.
        """
        with self._lock:
            self._state = HealthState(
                rank_nodes={rank: worker.node_id for rank, worker in enumerate(workers)},
                hostnames={worker.node_id: worker.hostname for worker in workers},
            )
            self._act = act
        if self._thread is None and self._policies:
            self._thread = threading.Thread(target=self._run, name="drawbar-health", daemon=True)
            self._thread.start()
        self._wake_up.set()

    def pause(self) -> None:
        """Stop the evaluators until the next attempt."""
        self._act = None

    def _run(self) -> None:
        try:
            while self._wait_for_work():
                state, act = self._state, self._act
                if act is not None:
                    monitors = self._get_monitors(state)
                    self._poll(state, monitors)
                    self._decide(state, act, monitors)
                    self._closed.wait(_MIN_EVALUATION_S)
        except Exception:
            if not self._closed.is_set():
                _logger.exception("the health checks have stopped; the run continues")
        finally:
            if self._monitors is not None:
                self._monitors.close()

    def _wait_for_work(self) -> bool:
        """Wait until a probe is due or a rank has reported. Return False at the end."""
        has_attempt = self._act is not None and self._due
        timeout = max(min(self._due) - time.monotonic(), 0.0) if has_attempt else None
        self._wake_up.wait(timeout)
        self._wake_up.clear()
        return not self._closed.is_set()

    def _get_monitors(self, state: HealthState) -> NodeMonitors:
        if self._monitors is None or self._monitors.hostnames != state.hostnames:
            if self._monitors is not None:
                self._monitors.close()
            self._monitors = NodeMonitors(
                state.hostnames, self._storage_path, self._runtime_env, is_preflight=False
            )
        return self._monitors

    def _poll(self, state: HealthState, monitors: NodeMonitors) -> None:
        for index, probe in enumerate(self._node_probes):
            if time.monotonic() >= self._due[index]:
                state.probe_results[type(probe)] = monitors.run(probe)
                self._due[index] = time.monotonic() + probe.interval_s

    def _decide(self, state: HealthState, act: Act, monitors: NodeMonitors) -> None:
        with self._lock:  # evaluators must not block the event loop, which stores reports
            view = replace(state, reported=dict(state.reported), steps=dict(state.steps))
        decisions = [
            decision
            for policy in self._policies
            for evaluator in policy.evaluators
            for decision in self._evaluate(evaluator, view)
        ]
        decision = merge_decisions(decisions)
        if decision is None or state is not self._state:
            return
        self._emit_decision(decision, state.hostnames)
        if isinstance(decision, Diagnose):
            self._diagnose(decision, state, monitors)
        else:
            if isinstance(decision, Evict):
                self._evicted |= set(decision.target_nodes)
            self.pause()  # until the next attempt: the same signal would trigger it again
            act(decision)

    def _evaluate(self, evaluator: Evaluator, state: HealthState) -> Sequence[HealthDecision]:
        """Return the decisions of an evaluator; none from one that has failed."""
        if evaluator in self._failed_evaluators:
            return []
        try:
            decisions = list(evaluator.evaluate(state))
            for decision in decisions:
                if not isinstance(decision, HealthDecision):
                    raise TypeError(f"evaluate() must return decisions, found {decision!r}")
                nodes = decision.target_nodes if isinstance(decision, Evict) else []
                if unknown := set(nodes) - state.hostnames.keys():
                    raise ValueError(
                        f"target_nodes has {sorted(unknown)}, but the IDs of the nodes are "
                        f"{sorted(state.hostnames)}"
                    )
        except Exception as error:
            self._failed_evaluators.append(evaluator)
            text = (
                f"The evaluator {type(evaluator).__name__} of the health checks raised "
                f"{type(error).__name__}: {error}. The run continues without it."
            )
            self._call_in_loop(self._emit, Notice(text))
            return []
        return decisions

    def _diagnose(self, decision: Diagnose, state: HealthState, monitors: NodeMonitors) -> None:
        nodes = list(decision.target_nodes)
        nodes += [state.rank_nodes[r] for r in decision.target_ranks if r in state.rank_nodes]
        for probe in decision.on_demand_probes:
            if probe.stop_workers:
                text = f"The probe {probe.title} was not run: it needs the GPUs of the workers."
                self._call_in_loop(self._emit, Notice(text))
            else:
                state.probe_results[type(probe)] = monitors.run(probe, nodes or None)
        self._wake_up.set()


def merge_evictions(evictions: Sequence[HealthDecision], node: str, reasons: list[str]) -> Evict:
    """Return one `Evict` of a node for all its reasons."""
    cause = next(
        each.cause for each in evictions if isinstance(each, Evict) and node in each.target_nodes
    )
    return Evict(cause, "; ".join(dict.fromkeys(reasons)), [node])


def list_candidates(
    nodes: Sequence[NodeResources], scaling: ScalingConfig, evicted: Collection[str]
) -> dict[str, str]:
    """Return the hosts of the nodes on which a worker may start, by ID of the node."""
    selectors: Sequence[Mapping[str, Any]] = scaling.label_selectors or [{}]
    return {
        node.node_id: node.hostname
        for node in nodes
        if node.node_id not in evicted
        and count_fitting_bundles(node.total, scaling.bundle)
        and any(matches_selector(node.labels, selector) for selector in selectors)
    }
