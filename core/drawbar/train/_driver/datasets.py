"""Open the datasets of a run and split them for each attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import ray

from drawbar.train._controller.run import RunSpec
from drawbar.train._data import preprocessing, row_notices, split
from drawbar.train._data.materialized_split import MaterializedSplits
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
    from ray.data.preprocessor import Preprocessor


class RunDatasets:
    """Datasets of a run.

    Everything that all attempts share is done here, before the first one: files are opened, a
    preprocessor is fitted, and materialized splits are computed for every possible world size.

    Args:
        spec: The run.

    Attributes:
        fitted_preprocessor: The fitted preprocessor, or None.
        notices: Console lines about the shards of the latest attempt.
    """

    def __init__(self, spec: RunSpec) -> None:
        connect_to_ray()  # with num_workers=0 Ray may not run, and Ray Data would start it itself
        self._config, self._scaling = spec.dataset_config, spec.scaling_config
        self._datasets = split.open_datasets(spec.datasets)
        split.check_row_counts(self._datasets, self._config, self._max_workers)
        driver_env = spec.worker_spec.surroundings
        self._is_in_trial = driver_env is not None and driver_env.tune_trial is not None
        self._check_trial_cpus(split.list_computed(self._datasets, self._config))
        self.fitted_preprocessor: Preprocessor | None = None
        if self._config.preprocessor is not None:
            if not preprocessing.is_fitted(self._config.preprocessor):
                self._check_trial_cpus(list(self._datasets))
            self.fitted_preprocessor = preprocessing.fit_preprocessor(
                self._config.preprocessor, self._datasets
            )
            self._datasets = preprocessing.apply_preprocessor(
                self.fitted_preprocessor, self._datasets
            )
        sizes = range(max(self._scaling.min_workers, 1), self._max_workers + 1)
        check_dataset_cpus(self._scaling, split.list_streamed(self._datasets, self._config))
        self._materialized_splits = MaterializedSplits()
        chosen = split.make_datasets(split.select_materialized(self._datasets, self._config))
        self._check_trial_cpus(split.list_computed(chosen, self._config))
        split.materialize_splits(chosen, self._config, sizes, self._materialized_splits)
        self._shards: list[dict[str, DatasetShard]] = []
        self._has_started = False
        self.notices: list[str] = []

    @property
    def _max_workers(self) -> int:
        return max(self._scaling.max_workers, 1)

    def describe_left_out(self) -> list[str]:
        """Return a console line for each dataset whose rows are left out."""
        return row_notices.describe_left_out(self._datasets, self._config, self._max_workers)

    def make_shards(
        self, node_ids: Sequence[str], positions: Mapping[str, object]
    ) -> Sequence[dict[str, DatasetShard] | ray.ObjectRef[dict[str, DatasetShard]]]:
        """Split the datasets between the ranks on these nodes, from their data positions.

        Sets `notices`.

        Args:
            node_ids: Node of each rank.
            positions: Data positions in the resume checkpoint.

        Returns:
            The shards of each rank.
        """
        datasets = split.make_datasets(self._datasets)
        split.check_row_counts(datasets, self._config, len(node_ids))
        # Checked again, because the datasets that functions create are known only now.
        streamed = split.list_streamed(datasets, self._config)
        self._check_cpus(streamed)
        # The streams of the previous attempt would continue to compute.
        self.close()
        is_local = self._scaling.max_workers == 0
        bundle = {} if is_local else self._scaling.bundle
        reserved = {name: amount * len(node_ids) for name, amount in bundle.items()}
        remaining = get_remaining_resources(reserved) if streamed else {}
        self._shards = split.make_shards(
            datasets, self._config, node_ids, positions, self._materialized_splits, remaining
        )
        if self._config.has_custom_split:  # it may have created other datasets
            self._check_cpus(split.list_streamed_shards(self._shards))
        self._has_started = True
        start_positions = {
            name: RowPosition.decode(positions.get(split.make_position_key(name)))  # type: ignore[arg-type]  # its own JSON
            for name in self._shards[0]
        }
        self.notices = row_notices.describe_resume(start_positions, self._shards[0], self._config)
        # One object per rank, so that a node does not fetch the shards of other ranks.
        return self._shards if is_local else [ray.put(shards) for shards in self._shards]

    def _check_trial_cpus(self, computed_datasets: Sequence[str]) -> None:
        """Reject computations before the start if the trials already hold every CPU."""
        if self._is_in_trial:
            check_unreserved_dataset_cpus(computed_datasets)

    def _check_cpus(self, streamed: Sequence[str]) -> None:
        check_dataset_cpus(self._scaling, streamed)
        # A run that has started waits instead: runs that started later may release their CPUs.
        if not self._has_started and (self._is_in_trial or self._scaling.max_workers):
            check_unreserved_dataset_cpus(streamed)

    def close(self) -> None:
        """Shut down the streams of the latest attempt's shards."""
        shut_down_streams(self._shards)
        self._shards = []
