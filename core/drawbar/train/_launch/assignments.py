"""What each attempt's workers are to do, worked out from the run's spec."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

import ray

from drawbar.train._data import split
from drawbar.train._data.exact_split import ExactSplits
from drawbar.train._data.shard import DatasetShard
from drawbar.train._group.capacity import missing, starting
from drawbar.train._group.cluster import check_data, draining_nodes, node_shapes
from drawbar.train._group.ranks import by_rank, visible_devices
from drawbar.train._history.events import AttemptStarted
from drawbar.train._launch.opening import OpenRun
from drawbar.train._launch.spec import RunSpec
from drawbar.train._messages import Assignment, Ranks, WorkerInfo
from drawbar.train._storage.checkpoint import Checkpoint


class SpecPlan:
    """The `Plan` of a run that was opened."""

    def __init__(self, spec: RunSpec, opened: OpenRun) -> None:
        self._spec = spec
        self._opened = opened
        self._exact_splits = ExactSplits()
        self._split_exactly()
        self._in_ray = ray.is_initialized()
        self._shards_in_use: list[dict[str, DatasetShard]] = []

    def _split_exactly(self) -> None:
        scaling = self._spec.scaling_config
        sizes = range(max(scaling.min_workers, 1), max(scaling.max_workers, 1) + 1)
        split.split_exactly(
            self._spec.datasets, self._spec.dataset_config, sizes, self._exact_splits
        )

    def assignments(
        self, start: AttemptStarted, workers: Sequence[WorkerInfo], ranks: Sequence[Ranks]
    ) -> list[Assignment]:
        """Say what each slot is to do."""
        checkpoint = self._checkpoint_of(start)
        manifest = checkpoint.manifest if checkpoint else None
        positions = manifest.positions if manifest else {}
        shards = self._shards([each.node_id for each in by_rank(workers, ranks)], positions)
        resources = self._spec.scaling_config.resources_per_worker
        return [
            Assignment(
                run_name=self._opened.name,
                run_id=self._opened.run_id,
                directory=self._opened.directory,
                attempt=start.attempt,
                first_index=start.first_index,
                checkpoint=checkpoint,
                ranks=each,
                metadata=self._spec.metadata,
                gpu_ids=worker.gpu_ids,
                environment=self._environment_of(worker, workers),
                cpus=resources.get("CPU") if resources else None,
                surroundings=self._spec.surroundings,
                shards=shards[each.world_rank],
                positions=positions,
                validation=self._spec.validation_defaults,
            )
            for worker, each in zip(workers, ranks, strict=True)
        ]

    def _checkpoint_of(self, start: AttemptStarted) -> Checkpoint | None:
        """Give the checkpoint that the journal names: of this run, or the one it began with."""
        if start.checkpoint is None:
            return None
        began_with = self._spec.resume_from_checkpoint
        if began_with is not None and began_with.path == start.checkpoint:
            return began_with
        return self._opened.directory.checkpoints.checkpoint(PurePath(start.checkpoint).name)

    def _environment_of(self, worker: WorkerInfo, workers: Sequence[WorkerInfo]) -> dict[str, str]:
        environment = self._spec.environment
        if not self._spec.backend_config.backend_cls.share_cuda_visible_devices:
            return environment
        if not worker.gpu_ids:
            return environment
        neighbours = [each for each in workers if each.node_id == worker.node_id]
        devices = visible_devices(neighbours)
        return {**environment, "CUDA_VISIBLE_DEVICES": devices}

    def _shards(self, node_ids: Sequence[str], positions: Mapping[str, Any]) -> list[Any]:
        datasets, config = self._spec.datasets, self._spec.dataset_config
        if not datasets:
            return [None] * len(node_ids)
        made = split.make(datasets)
        check_data(self._spec.scaling_config, split.lazy(made, config))
        self.close()
        shards = split.shard(made, config, node_ids, positions, self._exact_splits)
        self._shards_in_use = shards
        local = self._spec.scaling_config.max_workers == 0
        return list(shards) if local else [ray.put(each) for each in shards]

    def close(self) -> None:
        """End what hands out the rows of the newest attempt's shards."""
        split.end_streams(self._shards_in_use)
        self._shards_in_use = []

    def waiting_for(self, up: int, placed: bool) -> str:
        """Say what the workers that have not started are waiting for."""
        scaling = self._spec.scaling_config
        if scaling.max_workers == 0:
            return f"{up} of the processes that were launched together have called fit() so far"
        if placed:
            return starting(up, scaling.max_workers)
        bundles = [scaling.bundle] * scaling.min_workers
        return missing(node_shapes(), bundles)

    def draining(self) -> dict[str, int]:
        """Give the nodes that are about to go."""
        return draining_nodes() if self._in_ray else {}
