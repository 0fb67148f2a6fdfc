"""`CheckedWorkerGroup`: Ray workers that start on healthy nodes, and leave nodes that fail."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from functools import partial

import ray

from drawbar._health.decisions import Evict, HealthDecision
from drawbar._health_manager.health_manager import HealthManager
from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._process.serialization import Serialized
from drawbar._process.threads import run_in_daemon_thread
from drawbar._process.worker_failure import WorkerFailure
from drawbar.train._protocol.assignment import WorkerAssignment
from drawbar.train._protocol.messages import RankFailed
from drawbar.train._worker_group.actor_pool import ActorPool
from drawbar.train._worker_group.ray_group import RayWorkerGroup
from drawbar.train._worker_group.worker_group import AttemptEnd, OnMessages, OnWaiting


class CheckedWorkerGroup(RayWorkerGroup):
    """Ray workers with health checks.

    Args:
        pool: Processes of the workers.
        train_loop: Training function that every rank runs.
        health: Health checks of the run.
    """

    def __init__(
        self, pool: ActorPool, train_loop: ray.ObjectRef[Serialized], health: HealthManager
    ) -> None:
        super().__init__(pool, train_loop)
        self._health = health
        self._workers: list[WorkerInfo] = []
        self._has_evicted = False

    async def start(self, on_waiting: OnWaiting) -> list[tuple[WorkerInfo, Ranks]]:
        """Check the nodes if all processes are placed again, and start the missing workers."""
        self._health.use_loop(asyncio.get_running_loop())
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
        act = partial(loop.call_soon_threadsafe, self._act, on_messages)
        self._health.monitor(self._workers, act)

    def _act(self, on_messages: OnMessages, decision: HealthDecision) -> None:
        """End the attempt, as an error of a rank would."""
        targets = decision.target_nodes if isinstance(decision, Evict) else []
        for node in targets:
            self._has_evicted |= self.exclude_node(node)
        on_targets = (r for r, worker in enumerate(self._workers) if worker.node_id in targets)
        rank = next(on_targets, 0)
        worker = self._workers[rank]
        # The text "hardware failure" makes it a failure that no repetition can make deterministic.
        reason = f"hardware failure: {decision.reason}" if targets else decision.reason
        failure = WorkerFailure(
            rank=rank,
            kind="exception",
            type_name=type(decision).__name__,
            message=f"{reason} (decision of the health checks)",
            hostname=worker.hostname,
            node_id=worker.node_id,
            pid=worker.pid,
            time=time.time(),
        )
        on_messages(rank, [RankFailed(failure=failure)])

    async def end_attempt(self, end: AttemptEnd) -> None:
        """End an attempt. After an eviction, all processes are placed again."""
        self._health.pause()
        await super().end_attempt(end)
        if self._has_evicted:
            self._has_evicted = False
            self.kill()
