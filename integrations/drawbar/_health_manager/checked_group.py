"""`CheckedWorkerGroup`: Ray workers that start on healthy nodes, and leave nodes that fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import ray

from drawbar._health.decisions import Evict, HealthDecision
from drawbar._health_manager.health_manager import NO_ROOM, HealthManager
from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._process.serialization import Serialized
from drawbar._process.threads import run_in_daemon_thread
from drawbar._process.worker_failure import FailureKind, WorkerFailure
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.messages import RankFailed
from drawbar.train._worker_group.actor_pool import ActorPool
from drawbar.train._worker_group.ray_group import RayWorkerGroup, StartStores
from drawbar.train._worker_group.worker_group import AttemptEnd, OnMessages, OnWaiting


class CheckedWorkerGroup(RayWorkerGroup):
    """Ray workers with health checks.

    Args:
        pool: Processes of the workers.
        train_loop: Training function that every rank runs.
        health: Health checks of the run.
        start_stores: As in `RayWorkerGroup`.
    """

    def __init__(
        self,
        pool: ActorPool,
        train_loop: ray.ObjectRef[Serialized],
        health: HealthManager,
        start_stores: StartStores | None = None,
    ) -> None:
        super().__init__(pool, train_loop, start_stores)
        self._health = health
        self._workers: list[WorkerInfo] = []
        self._has_evicted = False

    async def start(self, on_waiting: OnWaiting) -> list[tuple[WorkerInfo, Ranks]]:
        """Check the nodes if all processes are placed again, and start the missing workers.

        After an eviction, all processes are placed again.
        """
        self._health.use_loop(asyncio.get_running_loop())
        if self._has_evicted:
            self._has_evicted = False
            self.kill()
        if not self._pool.slots:
            exclude = partial(self._pool.exclude_node, used={})
            await run_in_daemon_thread(self._health.check_nodes, exclude)
        workers = await super().start(on_waiting)
        self._workers = [worker for worker, _ in workers]
        return workers

    def run(self, assignments: Sequence[WorkerAssignment], on_messages: OnMessages) -> None:
        """Start an attempt, and monitor the nodes of its workers."""
        super().run(assignments, on_messages)
        loop = asyncio.get_running_loop()

        def act(decision: HealthDecision) -> None:
            failure = self._make_failure(decision)
            loop.call_soon_threadsafe(on_messages, failure.rank, [RankFailed(failure=failure)])

        self._health.monitor(self._workers, act)

    def _make_failure(self, decision: HealthDecision) -> WorkerFailure:
        """Exclude the nodes of an `Evict`, and return the failure that ends the attempt.

        Called in the thread of the health checks: Ray's control service may not reply at once.
        """
        targets = decision.target_nodes if isinstance(decision, Evict) else []
        has_room = all([self.exclude_node(node) for node in targets])
        self._has_evicted |= bool(targets)
        kind: FailureKind = "exception"
        if targets:
            kind = "evicted" if has_room else "configuration"
        rank = next((r for r, worker in enumerate(self._workers) if worker.node_id in targets), 0)
        worker = self._workers[rank]
        return WorkerFailure(
            rank=rank,
            kind=kind,
            type_name=type(decision).__name__,
            message=f"{decision.reason} (health check)" + ("" if has_room else f". {NO_ROOM}"),
            hostname=worker.hostname,
            node_id=worker.node_id,
            pid=worker.pid,
            time=time.time(),
        )

    async def end_attempt(self, end: AttemptEnd) -> None:
        """End an attempt, and its evaluations."""
        self._health.pause()
        await super().end_attempt(end)
