"""Start the memory stores of a run in the process of its controller."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drawbar._async_save.memory_store import OBSERVATION_KIND, RESTORE_GROUP, MemoryStore
from drawbar._records.event_stream import Emit, Watcher
from drawbar._records.events import AttemptStarted, CheckpointCommitted
from drawbar._records.live_events import Event, Notice, ObservationReceived
from drawbar.train._controller.run import OpenRun

_MAX_RESTARTS = 3
_NO_PEER = (
    "CheckpointConfig(memory_replication=True) has no effect while all workers are on one node, "
    "because there is no peer node."
)
_FAILED = (
    "Rank {rank} has not copied a checkpoint to its peer node: {reason}. If its node is lost "
    "before the next copy, the restart reads the storage. Further failures of this attempt are not "
    "shown."
)


@dataclass(frozen=True)
class NodeStores:
    """Memory stores, for the ranks on one node.

    Attributes:
        own: Handle of the store on the node.
        peer: Handle of the store that receives copies from the node; None if there is no other one.
        all_stores: Reference to the handles of all stores by node, also of earlier attempts. It is
            in a list, because only the store needs the handles.
    """

    own: Any
    peer: Any | None
    all_stores: Sequence[ray.ObjectRef[dict[str, Any]]]


class MemoryReplication:
    """Watcher that starts a memory store on each node of a run, and shows failed copies.

    Args:
        runtime_env: Runtime environment of the workers.
    """

    def __init__(self, runtime_env: Mapping[str, object] | None) -> None:
        remote: Any = ray.remote  # its stub does not know concurrency groups
        self._actor_class = remote(concurrency_groups={RESTORE_GROUP: 1})(MemoryStore)
        self._options: dict[str, object] = {"num_cpus": 0, "max_restarts": _MAX_RESTARTS}
        if runtime_env:
            self._options["runtime_env"] = dict(runtime_env)
        self._handles: dict[str, Any] = {}
        self._nodes: tuple[str, ...] = ()
        self._attempt = 0
        self._has_warned = False
        self._should_drop = False

    def watch(self, run: OpenRun, emit: Emit) -> Watcher:
        """Use an open run."""
        self._emit = emit
        return self

    def start_stores(self, nodes: Sequence[str]) -> dict[str, ray.ObjectRef[NodeStores]]:
        """Start the missing stores of an attempt.

        Args:
            nodes: ID of the node of each worker, in the order of the ranks.

        Returns:
            References for the ranks, by node; empty if there has been only one node. The objects
            have the same size with any number of nodes.
        """
        self._nodes = tuple(dict.fromkeys(nodes))
        self._should_drop = True  # not before: an earlier attempt may commit its last checkpoint
        if len(self._nodes) == 1:
            self._emit(Notice(_NO_PEER))
            if not self._handles:
                return {}
        for node in self._nodes:
            if node not in self._handles:
                strategy = NodeAffinitySchedulingStrategy(node, soft=False)
                actor = self._actor_class.options(scheduling_strategy=strategy, **self._options)
                self._handles[node] = actor.remote()
        all_stores = [ray.put(dict(self._handles))]
        peers = [*self._nodes[1:], self._nodes[0]]  # a ring
        return {
            node: ray.put(
                NodeStores(
                    self._handles[node],
                    None if peer == node else self._handles[peer],
                    all_stores,
                )
            )
            for node, peer in zip(self._nodes, peers, strict=True)
        }

    def on_event(self, event: Event) -> None:
        """Show a failed copy, or free the memory of earlier attempts."""
        match event:
            case AttemptStarted():
                self._attempt = event.attempt
                self._has_warned = self._should_drop = False
            case CheckpointCommitted() if self._should_drop:
                self._should_drop = False
                self._drop_earlier_attempts()
            case ObservationReceived(kind=kind) if kind == OBSERVATION_KIND:
                if not self._has_warned:  # all ranks may have the same problem
                    self._has_warned = True
                    self._emit(Notice(_FAILED.format(**event.payload)))
            case _:
                pass

    def _drop_earlier_attempts(self) -> None:
        for node in self._handles.keys() - set(self._nodes):
            _kill(self._handles.pop(node))
        for handle in self._handles.values():
            handle.drop.remote(self._attempt)

    def close(self) -> None:
        """End the stores."""
        while self._handles:
            _kill(self._handles.popitem()[1])


def _kill(handle: Any) -> None:
    with contextlib.suppress(RayError, ValueError):
        ray.kill(handle)
