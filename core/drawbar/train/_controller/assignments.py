"""Open the datasets of a run, and make the assignments of the workers for each attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from drawbar._base.node_resources import describe_missing_resources, describe_starting_workers
from drawbar._base.ray_compat import get_draining_nodes
from drawbar._process.rank_assignment import format_visible_devices
from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._records.events import AttemptStarted
from drawbar._records.rollback import find_positions
from drawbar._storage.checkpoint import Checkpoint
from drawbar.train._controller.run import OpenRun
from drawbar.train._protocol.assignment import WorkerAssignment, WorkerSpec
from drawbar.train._worker_group import cluster


class RunAssignmentPlanner:
    """Planner of the assignments of an open run."""

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._spec = run.spec
        self._data = self._spec.data_source
        self.metadata = self._spec.worker_spec.metadata
        if self._data is not None:
            self._data.open(run.context)
            self.metadata = {**self.metadata, **self._data.metadata}
        # Without Ray workers, Ray may not be running.
        self._is_on_ray = cluster.is_connected_to_ray()
        self._fork_errors: set[str] = set()  # that were shown

    @property
    def notices(self) -> Sequence[str]:
        """Console lines about the datasets: before the start, or of the latest assignments."""
        return () if self._data is None else self._data.notices

    def describe_fork_errors(self, workers: Sequence[tuple[WorkerInfo, Ranks]]) -> list[str]:
        """Return console lines about workers that the fork server could not fork, once each."""
        errors = {worker.fork_error for worker, _ in workers} - self._fork_errors - {""}
        self._fork_errors |= errors
        return [f"Workers started without the fork server: {error}" for error in sorted(errors)]

    def make_assignments(
        self, start: AttemptStarted, workers: Sequence[tuple[WorkerInfo, Ranks]]
    ) -> list[WorkerAssignment]:
        """Distribute the data and return the assignment of each worker, in rank order."""
        checkpoint = self._resolve_checkpoint(start)
        manifest = checkpoint.manifest if checkpoint else None
        own = manifest if manifest and manifest.run_id == self._run.run_id else None
        positions = find_positions(self._run.rollbacks, own)
        if positions is None:
            positions = manifest.data_positions if manifest else {}
        nodes = [worker.node_id for worker, _ in workers]
        shards = [None] * len(nodes) if self._data is None else self._data.assign(nodes, positions)
        specs = self._make_worker_specs([worker for worker, _ in workers])
        node_pids: dict[str, tuple[int, ...]] = {}
        for worker, _ in workers:
            node_pids[worker.node_id] = (*node_pids.get(worker.node_id, ()), worker.pid)
        return [
            WorkerAssignment(
                spec=specs[worker.node_id],
                run_id=self._run.run_id,
                run_directory=self._run.directory,
                attempt=start.attempt,
                first_attempt=self._run.next_attempt,
                first_report_index=start.first_report_index,
                resume_checkpoint=checkpoint,
                ranks=ranks,
                gpu_ids=worker.gpu_ids,
                # Only the lowest local rank needs them, so 64 ranks do not send 64 lists.
                node_pids=() if ranks.local_rank else node_pids[worker.node_id],
                open_shards=shards[ranks.world_rank],
                data_positions=positions,
                is_recovered_in_place=self._spec.run_config.failure_config.recovery == "in_place",
            )
            for worker, ranks in workers
        ]

    def _resolve_checkpoint(self, start: AttemptStarted) -> Checkpoint | None:
        """Return the resume checkpoint in the journal: of this run, or its initial checkpoint."""
        if start.resume_checkpoint is None:
            return None
        initial_checkpoint = self._spec.resume_from_checkpoint
        if initial_checkpoint is not None and initial_checkpoint.path == start.resume_checkpoint:
            return initial_checkpoint
        run_path = self._run.directory.root.fs_path
        return self._run.directory.checkpoints.get_checkpoint(
            start.resume_checkpoint.removeprefix(f"{run_path}/")
        )

    def _make_worker_specs(self, workers: Sequence[WorkerInfo]) -> dict[str, WorkerSpec]:
        """Return the spec of the workers by node, with the devices that they share there."""
        spec = replace(self._spec.worker_spec, metadata=self.metadata)
        by_node: dict[str, list[WorkerInfo]] = {}
        for worker in workers:
            by_node.setdefault(worker.node_id, []).append(worker)
        should_share = self._spec.backend_config.backend_cls.share_cuda_visible_devices
        return {
            node: _share_devices(spec, neighbors) if should_share else spec
            for node, neighbors in by_node.items()
        }

    def close(self) -> None:
        """Close the datasets."""
        if self._data is not None:
            self._data.close()

    def describe_wait(self, num_ready: int, is_placed: bool) -> str:
        """Describe what the workers that have not started are waiting for."""
        scaling = self._spec.scaling_config
        if scaling.max_workers == 0:
            return f"waiting for all torchrun processes to call fit(), {num_ready} have called it"
        if is_placed:
            return describe_starting_workers(num_ready, scaling.max_workers)
        return describe_missing_resources(
            cluster.list_node_resources(), scaling.bundle, scaling.min_workers
        )

    def get_draining_nodes(self) -> dict[str, int]:
        """Return the draining nodes: id to deadline in ms since the epoch, 0 if unknown."""
        return get_draining_nodes() if self._is_on_ray else {}


def _share_devices(spec: WorkerSpec, workers: Sequence[WorkerInfo]) -> WorkerSpec:
    devices = format_visible_devices(workers)
    if not devices:
        return spec
    return replace(spec, env_vars={**spec.env_vars, "CUDA_VISIBLE_DEVICES": devices})
