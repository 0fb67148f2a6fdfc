"""Open the datasets of a run and split them for each attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from drawbar.train._controller.run import RunSpec
from drawbar.train._data import split, user_datasets
from drawbar.train._data.shard import DatasetShard
from drawbar.train._data.streams import shut_down_streams
from drawbar.train._row_positions import RowPosition
from drawbar.train._worker_group.cluster import (
    check_dataset_cpus,
    check_unreserved_dataset_cpus,
    connect_to_ray,
    get_remaining_resources,
)

if TYPE_CHECKING:
    import ray
    from ray.data.preprocessor import Preprocessor


class RunDatasets:
    """Datasets of a run.

    The constructor does the work that all attempts share: it opens files, fits the preprocessor,
    and computes materialized splits for every possible world size.

    Args:
        spec: The run.

    Attributes:
        fitted_preprocessor: The fitted preprocessor, or None.
        notices: Console lines about the shards of the latest attempt.
    """

    def __init__(self, spec: RunSpec) -> None:
        # With num_workers=0, Ray is possibly not started. Ray Data would start it with defaults.
        connect_to_ray()
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
        check_dataset_cpus(self._scaling, split.list_streamed(self._datasets, self._config))
        self._materialized: split.MaterializedDatasets = {}
        materialized = user_datasets.make_datasets(
            split.select_materialized(self._datasets, self._config)
        )
        self._check_trial_cpus(split.list_datasets_to_execute(materialized, self._config))
        split.materialize_splits(materialized, self._config, world_sizes, self._materialized)
        self._shards: list[dict[str, DatasetShard]] = []
        self._has_started = False
        self.notices: list[str] = []

    @property
    def _max_workers(self) -> int:
        return max(self._scaling.max_workers, 1)

    def describe_left_out_rows(self) -> list[str]:
        """Return a console line for each dataset that has rows which no rank receives."""
        return split.describe_left_out_rows(self._datasets, self._config, self._max_workers)

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
        remaining = get_remaining_resources(reserved) if streamed else {}
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
            check_unreserved_dataset_cpus(datasets_to_execute)

    def _check_cpus(self, streamed: Sequence[str]) -> None:
        check_dataset_cpus(self._scaling, streamed)
        # A restart is not an error: Ray Data waits until another run releases its CPUs.
        if not self._has_started and (self._is_in_trial or self._scaling.max_workers):
            check_unreserved_dataset_cpus(streamed)

    def close(self) -> None:
        """Shut down the streams of the latest attempt's shards."""
        shut_down_streams(self._shards)
        self._shards = []
