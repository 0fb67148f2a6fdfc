"""Make the assignments of the workers for each attempt."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from drawbar.train._controller.run import OpenRun
from drawbar.train._driver.datasets import RunDatasets
from drawbar.train._history.events import AttemptStarted
from drawbar.train._protocol.assignment import Ranks, WorkerAssignment, WorkerInfo, WorkerSpec
from drawbar.train._ray_compat import get_draining_nodes
from drawbar.train._storage.checkpoint import Checkpoint, add_preprocessor
from drawbar.train._storage.remote_path import RemotePath
from drawbar.train._worker_group.capacity import (
    describe_missing_resources,
    describe_starting_workers,
)
from drawbar.train._worker_group.cluster import (
    is_connected_to_ray,
    list_node_resources,
)
from drawbar.train._worker_group.ranks import format_visible_devices, sort_by_rank


class RunAssignmentPlanner:
    """Planner of the assignments of an open run."""

    def __init__(self, run: OpenRun) -> None:
        self._run = run
        self._spec = run.spec
        self._datasets = RunDatasets(self._spec) if self._spec.datasets else None
        self.metadata = self._spec.worker_spec.metadata
        if self._datasets is not None and self._datasets.fitted_preprocessor is not None:
            self.metadata = add_preprocessor(self.metadata, self._datasets.fitted_preprocessor)
        # Without Ray workers, Ray may not be running.
        self._is_on_ray = is_connected_to_ray()

    def describe_left_out_rows(self) -> list[str]:
        """Return a console line for each dataset that has rows which no rank receives."""
        return [] if self._datasets is None else self._datasets.describe_left_out_rows()

    @property
    def notices(self) -> list[str]:
        """Console lines about the datasets of the most recent assignments."""
        return [] if self._datasets is None else self._datasets.notices

    def make_assignments(
        self, start: AttemptStarted, workers: Sequence[WorkerInfo], ranks: Sequence[Ranks]
    ) -> list[WorkerAssignment]:
        """Return the assignment of each slot."""
        checkpoint = self._resolve_checkpoint(start)
        manifest = checkpoint.manifest if checkpoint else None
        positions = manifest.data_positions if manifest else {}
        shards: Sequence[object] = [None] * len(workers)
        if self._datasets is not None:
            nodes = [worker.node_id for worker in sort_by_rank(workers, ranks)]
            shards = self._datasets.make_shards(nodes, positions)
        specs = self._make_worker_specs(workers)
        return [
            WorkerAssignment(
                spec=specs[worker.node_id],
                run_id=self._run.run_id,
                run_directory=self._run.directory,
                attempt=start.attempt,
                first_report_index=start.first_report_index,
                resume_checkpoint=checkpoint,
                ranks=worker_ranks,
                gpu_ids=worker.gpu_ids,
                dataset_shards=shards[worker_ranks.world_rank],
                data_positions=positions,
            )
            for worker, worker_ranks in zip(workers, ranks, strict=True)
        ]

    def _resolve_checkpoint(self, start: AttemptStarted) -> Checkpoint | None:
        """Return the resume checkpoint in the journal: of this run, or its initial checkpoint."""
        if start.resume_checkpoint is None:
            return None
        initial_checkpoint = self._spec.resume_from_checkpoint
        if initial_checkpoint is not None and initial_checkpoint.path == start.resume_checkpoint:
            return initial_checkpoint
        root = self._run.directory.root
        run_path = root.fs_path if isinstance(root, RemotePath) else str(root)
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
        """Shut down the streams of the latest attempt's shards."""
        if self._datasets is not None:
            self._datasets.close()

    def describe_wait(self, num_ready: int, is_placed: bool) -> str:
        """Describe what the workers that have not started are waiting for."""
        scaling = self._spec.scaling_config
        if scaling.max_workers == 0:
            return f"waiting for all torchrun processes to call fit(), {num_ready} have called it"
        if is_placed:
            return describe_starting_workers(num_ready, scaling.max_workers)
        return describe_missing_resources(
            list_node_resources(), scaling.bundle, scaling.min_workers
        )

    def get_draining_nodes(self) -> dict[str, int]:
        """Return the nodes that will be removed soon."""
        return get_draining_nodes() if self._is_on_ray else {}


def _share_devices(spec: WorkerSpec, workers: Sequence[WorkerInfo]) -> WorkerSpec:
    devices = format_visible_devices(workers)
    if not devices:
        return spec
    return replace(spec, env_vars={**spec.env_vars, "CUDA_VISIBLE_DEVICES": devices})
