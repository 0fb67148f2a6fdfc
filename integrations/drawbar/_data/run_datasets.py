"""`RunDatasets`: the datasets of a trainer as the data source of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from drawbar._data import cluster_cpus, split, user_datasets
from drawbar._data.data_config import DataConfig
from drawbar._data.rank_shards import RankShards
from drawbar._data.row_positions import RowPosition
from drawbar._data.shard import DatasetShard
from drawbar._data.streams import shut_down_streams
from drawbar._process.driver_env import is_in_tune_trial
from drawbar._ray_connection.connection import connect_to_ray
from drawbar._storage.checkpoint import add_preprocessor
from drawbar.train._config.data_source import DataSource
from drawbar.train._config.run_config import RunContext
from drawbar.train._config.scaling_config import ScalingConfig


class RunDatasets(DataSource):
    """Datasets of a run.

    Args:
        datasets: Datasets by name.
        config: How they are split.
    """

    def __init__(self, datasets: Mapping[str, object], config: DataConfig) -> None:
        self._datasets, self._config = datasets, config
        self._is_in_trial = is_in_tune_trial()  # of the driver
        self._scaling = ScalingConfig()
        self._materialized: split.MaterializedDatasets = {}
        self._shards: list[dict[str, DatasetShard]] = []
        self._has_started = False

    def check(self, scaling_config: ScalingConfig) -> None:
        """Reject workers that leave no CPU for datasets."""
        streamed = split.list_streamed(self._datasets, self._config)
        cluster_cpus.check_dataset_cpus(scaling_config, streamed)

    def open(self, run: RunContext) -> None:
        """Open files, fit the preprocessor, and compute splits for every possible world size."""
        # With num_workers=0, Ray is possibly not started. Ray Data would start it with defaults.
        connect_to_ray()
        self._scaling = run.scaling_config
        self._datasets = user_datasets.open_datasets(self._datasets)
        split.check_row_counts(self._datasets, self._config, self._max_workers)
        self._check_trial_cpus(split.list_datasets_to_execute(self._datasets, self._config))
        if (preprocessor := self._config.preprocessor) is not None:
            if not user_datasets.is_fitted(preprocessor):
                self._check_trial_cpus(list(self._datasets))
            fitted = user_datasets.fit_preprocessor(preprocessor, self._datasets)
            self.metadata = add_preprocessor({}, fitted)
            self._datasets = user_datasets.apply_preprocessor(fitted, self._datasets)
        world_sizes = range(max(self._scaling.min_workers, 1), self._max_workers + 1)
        cluster_cpus.check_dataset_cpus(
            self._scaling, split.list_streamed(self._datasets, self._config)
        )
        materialized = user_datasets.make_datasets(
            split.select_materialized(self._datasets, self._config)
        )
        self._check_trial_cpus(split.list_datasets_to_execute(materialized, self._config))
        split.materialize_splits(materialized, self._config, world_sizes, self._materialized)
        self.notices = split.describe_left_out_rows(self._datasets, self._config, self._max_workers)

    @property
    def _max_workers(self) -> int:
        return max(self._scaling.max_workers, 1)

    def assign(
        self, node_ids: Sequence[str], positions: Mapping[str, object]
    ) -> Sequence[RankShards]:
        """Split the datasets between the ranks. Each dataset continues at its position."""
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
        remaining = cluster_cpus.get_remaining_resources(reserved) if streamed else {}
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
            return [RankShards(shards) for shards in self._shards]
        import ray

        # One object per rank, so that a node does not fetch the shards of other ranks.
        return [RankShards(ray.put(shards)) for shards in self._shards]

    def _check_trial_cpus(self, datasets_to_execute: Sequence[str]) -> None:
        """Raise an error if datasets need a CPU, but Tune trials have reserved all CPUs."""
        if self._is_in_trial:
            cluster_cpus.check_unreserved_dataset_cpus(datasets_to_execute)

    def _check_cpus(self, streamed: Sequence[str]) -> None:
        cluster_cpus.check_dataset_cpus(self._scaling, streamed)
        # A restart is not an error: Ray Data waits until another run releases its CPUs.
        if not self._has_started and (self._is_in_trial or self._scaling.max_workers):
            cluster_cpus.check_unreserved_dataset_cpus(streamed)

    def close(self) -> None:
        """Shut down the streams of the latest attempt's shards."""
        shut_down_streams(self._shards)
        self._shards = []


def make_data_source(
    datasets: Mapping[str, object] | DataSource, config: DataConfig
) -> DataSource | None:
    """Return the data source of a run; None if the trainer has no datasets."""
    if isinstance(datasets, DataSource):
        return datasets
    return RunDatasets(datasets, config) if datasets else None
