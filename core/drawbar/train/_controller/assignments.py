"""Open the datasets of a run, and make the assignments of the workers for each attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from drawbar._base.ray_compat import get_draining_nodes
from drawbar._data import split, user_datasets
from drawbar._data.shard import DatasetShard
from drawbar._data.streams import shut_down_streams
from drawbar._process.ranks import Ranks, WorkerInfo
from drawbar._records.events import AttemptStarted
from drawbar._records.row_positions import RowPosition
from drawbar._storage.checkpoint import Checkpoint, add_preprocessor
from drawbar._storage.storage_path import get_fs_path
from drawbar.train._controller.run import OpenRun, RunSpec
from drawbar.train._protocol.assignment import WorkerAssignment, WorkerSpec
from drawbar.train._worker_group import cluster
from drawbar.train._worker_group.capacity import (
    describe_missing_resources,
    describe_starting_workers,
)
from drawbar.train._worker_group.ranks import format_visible_devices

if TYPE_CHECKING:
    import ray
    from ray.data.preprocessor import Preprocessor


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
        self._is_on_ray = cluster.is_connected_to_ray()
        self._fork_errors: set[str] = set()  # that were shown

    @property
    def notices(self) -> list[str]:
        """Console lines about the datasets: before the start, or of the latest assignments."""
        return [] if self._datasets is None else self._datasets.notices

    def describe_fork_errors(self, workers: Sequence[tuple[WorkerInfo, Ranks]]) -> list[str]:
        """Return console lines about workers that the fork server could not fork, once each."""
        errors = {worker.fork_error for worker, _ in workers} - self._fork_errors - {""}
        self._fork_errors |= errors
        return [
            f"Workers started without the fork server (RunConfig.forkserver_preload): {error}"
            for error in sorted(errors)
        ]

    def make_assignments(
        self, start: AttemptStarted, workers: Sequence[tuple[WorkerInfo, Ranks]]
    ) -> list[WorkerAssignment]:
        """Shard the datasets and return the assignment of each worker, in rank order."""
        checkpoint = self._resolve_checkpoint(start)
        manifest = checkpoint.manifest if checkpoint else None
        positions = manifest.data_positions if manifest else {}
        shards: Sequence[object] = [None] * len(workers)
        if self._datasets is not None:
            nodes = [worker.node_id for worker, _ in workers]
            shards = self._datasets.make_shards(nodes, positions)
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
                first_report_index=start.first_report_index,
                resume_checkpoint=checkpoint,
                ranks=ranks,
                gpu_ids=worker.gpu_ids,
                # Only the lowest local rank needs them, so 64 ranks do not send 64 lists.
                node_pids=() if ranks.local_rank else node_pids[worker.node_id],
                dataset_shards=shards[ranks.world_rank],
                data_positions=positions,
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
        run_path = get_fs_path(self._run.directory.root)
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


class RunDatasets:
    """Datasets of a run.

    The constructor does the work that all attempts share: it opens files, fits the preprocessor,
    and computes materialized splits for every possible world size.

    Args:
        spec: The run.

    Attributes:
        fitted_preprocessor: The fitted preprocessor, or None.
        notices: Console lines about rows that no rank receives; after `make_shards`, about the
            shards of the latest attempt.
    """

    def __init__(self, spec: RunSpec) -> None:
        # With num_workers=0, Ray is possibly not started. Ray Data would start it with defaults.
        cluster.connect_to_ray()
        self._config, self._scaling = spec.dataset_config, spec.scaling_config
        self._datasets = user_datasets.open_datasets(spec.datasets)
        split.check_row_counts(self._datasets, self._config, self._max_workers)
        driver_env = spec.worker_spec.driver_env
        self._is_in_trial = driver_env is not None and driver_env.tune_trial is not None
        self._check_trial_cpus(split.list_datasets_to_execute(self._datasets, self._config))
        self.fitted_preprocessor: Preprocessor | None = None
        if self._config.preprocessor is not None:
            if not user_datasets.is_fitted(self._config.preprocessor):
                self._check_trial_cpus(list(self._datasets))
            self.fitted_preprocessor = user_datasets.fit_preprocessor(
                self._config.preprocessor, self._datasets
            )
            self._datasets = user_datasets.apply_preprocessor(
                self.fitted_preprocessor, self._datasets
            )
        world_sizes = range(max(self._scaling.min_workers, 1), self._max_workers + 1)
        cluster.check_dataset_cpus(self._scaling, split.list_streamed(self._datasets, self._config))
        self._materialized: split.MaterializedDatasets = {}
        materialized = user_datasets.make_datasets(
            split.select_materialized(self._datasets, self._config)
        )
        self._check_trial_cpus(split.list_datasets_to_execute(materialized, self._config))
        split.materialize_splits(materialized, self._config, world_sizes, self._materialized)
        self._shards: list[dict[str, DatasetShard]] = []
        self._has_started = False
        self.notices = split.describe_left_out_rows(self._datasets, self._config, self._max_workers)

    @property
    def _max_workers(self) -> int:
        return max(self._scaling.max_workers, 1)

    def make_shards(
        self, node_ids: Sequence[str], positions: Mapping[str, object]
    ) -> Sequence[dict[str, DatasetShard] | ray.ObjectRef[dict[str, DatasetShard]]]:
        """Split the datasets between the ranks. Each dataset continues at its position.

        Sets `notices`.

        Args:
            node_ids: Node of each rank.
            positions: Positions of the datasets in the resume checkpoint.

        Returns:
            The shards of each rank.
        """
        created = user_datasets.make_datasets(self._datasets)
        split.check_row_counts(created, self._config, len(node_ids))
        # Checked again, because the datasets that functions create are known only now.
        streamed = split.list_streamed(created, self._config)
        self._check_cpus(streamed)
        # Otherwise, the streams of the previous attempt would continue to use CPUs.
        self.close()
        is_local = self._scaling.max_workers == 0
        bundle = {} if is_local else self._scaling.bundle
        reserved = {name: amount * len(node_ids) for name, amount in bundle.items()}
        remaining = cluster.get_remaining_resources(reserved) if streamed else {}
        self._shards = split.make_shards(
            created, self._config, node_ids, positions, self._materialized, remaining
        )
        if self._config.has_custom_split:  # `configure()` may have created other datasets
            self._check_cpus(split.list_streamed_shards(self._shards))
        self._has_started = True
        start_positions = {
            name: RowPosition.decode(positions.get(split.make_position_key(name)))  # type: ignore[arg-type]  # from RowPosition.encode()
            for name in self._shards[0]
        }
        self.notices = split.describe_resume(start_positions, self._shards[0], self._config)
        if is_local:
            return self._shards
        import ray

        # One object per rank, so that a node does not fetch the shards of other ranks.
        return [ray.put(shards) for shards in self._shards]

    def _check_trial_cpus(self, datasets_to_execute: Sequence[str]) -> None:
        """Raise an error if datasets need a CPU, but Tune trials have reserved all CPUs."""
        if self._is_in_trial:
            cluster.check_unreserved_dataset_cpus(datasets_to_execute)

    def _check_cpus(self, streamed: Sequence[str]) -> None:
        cluster.check_dataset_cpus(self._scaling, streamed)
        # A restart is not an error: Ray Data waits until another run releases its CPUs.
        if not self._has_started and (self._is_in_trial or self._scaling.max_workers):
            cluster.check_unreserved_dataset_cpus(streamed)

    def close(self) -> None:
        """Shut down the streams of the latest attempt's shards."""
        shut_down_streams(self._shards)
        self._shards = []
