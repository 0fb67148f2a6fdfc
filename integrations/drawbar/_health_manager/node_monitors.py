"""One actor per node, which runs probes there, also if the workers of the node are dead."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drawbar._health.probes import NodeContext, Probe, ProbeResult
from drawbar._health_manager.all_reduce import AllReducePeer, last_line
from drawbar._health_manager.builtin_probes import AllReduceProbe, ClockProbe

_RESULT = msgspec.json.Decoder(ProbeResult)
_logger = logging.getLogger("drawbar.train")


START_S = 600.0
"""Time limit for the start of the processes that run probes."""


class NodeMonitor(AllReducePeer):
    """Ray actor that runs probes on one node, with zero CPUs."""

    def __init__(self) -> None:
        if not os.environ.get("CUDA_VISIBLE_DEVICES", "none"):
            # Ray hides the GPUs from actors that did not request any.
            del os.environ["CUDA_VISIBLE_DEVICES"]

    def run_probe(self, probe: Any, context: NodeContext) -> bytes:
        """Run a probe. Returns its result as JSON. Exceptions but MemoryError fail it.

        Raises:
            TypeError: The probe did not return a result, so the health of the node is unknown.
        """
        try:
            result = probe.poll(context)
        except MemoryError as error:  # a busy node is not unhealthy
            result = ProbeResult(detail=f"{type(error).__name__}: {error}")
        except Exception as error:
            result = ProbeResult(passed=False, detail=f"{type(error).__name__}: {error}")
        if not isinstance(result, ProbeResult | None):
            raise TypeError(f"poll() must return a ProbeResult or None, found {result!r}")
        return msgspec.json.encode(result if result is not None else ProbeResult())


class NodeMonitors:
    """The actors of some nodes.

    Args:
        hostnames: Host of each node, by its ID.
        storage_path: Run directory.
        runtime_env: Ray runtime environment of the actors.
        is_preflight: Whether the probes run before a start.
    """

    def __init__(
        self,
        hostnames: Mapping[str, str],
        storage_path: str,
        runtime_env: Mapping[str, object] | None,
        *,
        is_preflight: bool,
    ) -> None:
        self.hostnames = hostnames
        self._storage_path = storage_path
        self._runtime_env = dict(runtime_env or {})
        self._is_preflight = is_preflight
        self._actors: dict[str, Any] = {}

    def run(self, probe: Probe, nodes: Sequence[str] | None = None) -> dict[str, ProbeResult]:
        """Run a probe on nodes at the same time. Returns the results by node.

        Args:
            probe: The probe.
            nodes: IDs of nodes. Default: all.
        """
        nodes = [n for n in (nodes or list(self.hostnames)) if n in self.hostnames]
        # The time limit of a probe does not include the start of a process on a busy node.
        ready = [self._get(node).__ray_ready__.remote() for node in nodes]
        ray.wait(ready, num_returns=len(ready), timeout=START_S)
        references = {}
        sent = time.time()
        for node in nodes:
            context = NodeContext(
                node, self.hostnames[node], self._storage_path, self._is_preflight
            )
            references[node] = self._get(node).run_probe.remote(probe, context)
        results = {node: self._wait(probe, node, ref) for node, ref in references.items()}
        if isinstance(probe, ClockProbe):
            return {node: probe.judge(r, sent, time.time()) for node, r in results.items()}
        if not isinstance(probe, AllReduceProbe):
            return results
        able = [node for node, result in results.items() if result.passed is None]
        return results | find_failed_pairs(able, lambda pairs: self._test_pairs(probe, pairs))

    def _wait(self, probe: Probe, node: str, reference: Any) -> ProbeResult:
        try:
            return _RESULT.decode(ray.get(reference, timeout=probe.timeout_s))
        except ray.exceptions.OutOfMemoryError as error:  # a busy node is not unhealthy
            self._kill(node)
            return ProbeResult(detail=last_line(error))
        except TypeError as error:
            detail = last_line(error)
            _logger.warning("the health probe %s has no result: %s", probe.title, detail)
            return ProbeResult(detail=detail)
        except ray.exceptions.GetTimeoutError:
            detail = f"no result after {probe.timeout_s:g} s"
        except Exception as error:
            detail = last_line(error)
        self._kill(node)
        return ProbeResult(passed=False, detail=detail)

    def _test_pairs(
        self, probe: AllReduceProbe, pairs: Sequence[tuple[str, str]]
    ) -> list[ProbeResult]:
        """Run the all-reduce of all pairs at the same time."""
        started = []
        for first, second in pairs:
            actors = [self._get(first), self._get(second)]
            store: Any = actors[0].start_store.remote()
            started.append((actors, store))
        measured: list[str | list[Any]] = []
        for actors, store in started:
            try:
                address, port = ray.get(store, timeout=probe.timeout_s)
            except Exception as error:
                measured.append(last_line(error))
                continue
            measured.append(
                [
                    actor.measure_allreduce.remote(address, port, rank, probe.backend)
                    for rank, actor in enumerate(actors)
                ]
            )
        results = []
        for pair, references in zip(pairs, measured, strict=True):
            try:
                speeds = (
                    references
                    if isinstance(references, str)
                    else ray.get(references, timeout=probe.timeout_s)
                )
            except Exception as error:
                speeds = last_line(error)
                for node in pair:
                    self._kill(node)
            results.append(_judge_pair(pair, speeds, self.hostnames))
        return results

    def _get(self, node: str) -> Any:
        if node not in self._actors:
            remote: Any = ray.remote(NodeMonitor)
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            options = {"num_cpus": 0, "scheduling_strategy": strategy}
            if self._runtime_env:
                options["runtime_env"] = self._runtime_env
            self._actors[node] = remote.options(**options).remote()
        return self._actors[node]

    def _kill(self, node: str) -> None:
        if node in self._actors:
            ray.kill(self._actors.pop(node))

    def close(self) -> None:
        """Kill the actors."""
        for node in list(self._actors):
            self._kill(node)


def _judge_pair(pair: tuple[str, str], speeds: Any, hostnames: Mapping[str, str]) -> ProbeResult:
    names = " and ".join(f"{hostnames[node]} ({node[:8]})" for node in pair)
    errors = [speeds] if isinstance(speeds, str) else [s for s in speeds if isinstance(s, str)]
    if errors:
        return ProbeResult(passed=False, detail=f"{names}: {errors[0]}")
    speed = min(speeds)
    return ProbeResult(
        metrics={"bytes_per_s": speed},
        passed=True,
        detail=f"{names}: {speed / 1e9:.3f} GB/s",
    )


def find_failed_pairs(
    nodes: Sequence[str],
    test: Callable[[Sequence[tuple[str, str]]], Sequence[ProbeResult]],
) -> dict[str, ProbeResult]:
    """Test each node with a partner, and nodes of failed pairs with a node that has passed.

    Args:
        nodes: IDs of the nodes.
        test: Tests pairs at the same time, and returns their results. No node is in two pairs.

    Returns:
        Results by node. If no pair has passed, all nodes have failed.
    """
    pairs = list(zip(nodes[::2], nodes[1::2], strict=False))
    results: dict[str, ProbeResult] = {}
    for pair, result in zip(pairs, test(pairs), strict=True):
        results |= dict.fromkeys(pair, result)
    if (unpaired := nodes[len(pairs) * 2 :]) and not any(r.passed for r in results.values()):
        # No node is known to be healthy: the last one may be, if it works with another one.
        for node in list(results):
            (result,) = test([(node, unpaired[0])])
            results[unpaired[0]] = result
            if result.passed:
                results[node] = result
                break
    waiting = [node for node in nodes if node not in results or results[node].passed is False]
    healthy = [node for node in results if results[node].passed]
    while waiting and healthy:
        again = list(zip(waiting, healthy, strict=False))
        for (node, _), result in zip(again, test(again), strict=True):
            results[node] = result
        waiting = waiting[len(again) :]
    return results
