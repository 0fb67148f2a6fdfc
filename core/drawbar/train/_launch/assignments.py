"""What each attempt's workers are to do, worked out from the run's spec."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import ray

from drawbar.train._controller.run import Run
from drawbar.train._group.capacity import missing, starting
from drawbar.train._group.cluster import draining_nodes, node_shapes
from drawbar.train._group.ranks import by_rank, visible_devices
from drawbar.train._history.events import AttemptStarted
from drawbar.train._launch.datasets import RunDatasets
from drawbar.train._messages import Assignment, Ranks, WorkerInfo, WorkerSpec
from drawbar.train._storage.checkpoint import Checkpoint, with_preprocessor
from drawbar.train._storage.remote_folder import Folder


class SpecPlan:
    """The `Plan` of a run that was opened."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._spec = run.spec
        self._datasets = RunDatasets(self._spec) if self._spec.datasets else None
        self.metadata = self._spec.worker.metadata
        if self._datasets is not None and self._datasets.fitted is not None:
            self.metadata = with_preprocessor(self.metadata, self._datasets.fitted)
        # With `num_workers=0` there may be none to ask.
        self._in_ray = ray.is_initialized()

    def describe_left_out(self) -> list[str]:
        """Return a console line for each dataset whose rows are left out."""
        return [] if self._datasets is None else self._datasets.describe_left_out()

    @property
    def notices(self) -> list[str]:
        """Console lines about the datasets of the most recent assignments."""
        return [] if self._datasets is None else self._datasets.notices

    def assignments(
        self, start: AttemptStarted, workers: Sequence[WorkerInfo], ranks: Sequence[Ranks]
    ) -> list[Assignment]:
        """Say what each slot is to do."""
        checkpoint = self._checkpoint_of(start)
        manifest = checkpoint.manifest if checkpoint else None
        positions = manifest.positions if manifest else {}
        shards: Sequence[object] = [None] * len(workers)
        if self._datasets is not None:
            nodes = [each.node_id for each in by_rank(workers, ranks)]
            shards = self._datasets.shards(nodes, positions)
        return [
            Assignment(
                spec=self._spec_of(worker, workers),
                run_id=self._run.run_id,
                directory=self._run.directory,
                attempt=start.attempt,
                first_index=start.first_index,
                checkpoint=checkpoint,
                ranks=each,
                gpu_ids=worker.gpu_ids,
                shards=shards[each.world_rank],
                positions=positions,
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
        home = self._run.directory.home
        run = home.path if isinstance(home, Folder) else str(home)
        return self._run.directory.checkpoints.checkpoint(start.checkpoint.removeprefix(f"{run}/"))

    def _spec_of(self, worker: WorkerInfo, workers: Sequence[WorkerInfo]) -> WorkerSpec:
        """Give the spec of all workers, with the devices that those of this node share."""
        spec = replace(self._spec.worker, metadata=self.metadata)
        shares = self._spec.backend_config.backend_cls.share_cuda_visible_devices
        if not shares or not worker.gpu_ids:
            return spec
        devices = visible_devices([each for each in workers if each.node_id == worker.node_id])
        return replace(spec, environment={**spec.environment, "CUDA_VISIBLE_DEVICES": devices})

    def close(self) -> None:
        """End what hands out the rows of the newest attempt's shards."""
        if self._datasets is not None:
            self._datasets.close()

    def waiting_for(self, up: int, placed: bool) -> str:
        """Say what the workers that have not started are waiting for."""
        scaling = self._spec.scaling_config
        if scaling.max_workers == 0:
            return f"{up} of the processes that were launched together have called fit() so far"
        if placed:
            return starting(up, scaling.max_workers)
        return missing(node_shapes(), scaling.bundle, scaling.min_workers)

    def draining(self) -> dict[str, int]:
        """Give the nodes that are about to go."""
        return draining_nodes() if self._in_ray else {}
