"""The datasets of a run: opened once, and split anew for each attempt."""

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
    """What the datasets of a trainer are for the workers of its run.

    What takes part in every attempt is done here, before the first one: files are opened, a
    preprocessor is fitted, exact parts are computed for every size that the group may have.

    Args:
        spec: Of the run.

    Attributes:
        fitted: The preprocessor; None if there is none.
        notices: Console lines about the most recent attempt's shards.
    """

    def __init__(self, spec: RunSpec) -> None:
        connect_to_ray()  # with num_workers=0 nobody has, and Ray would start itself and end soon
        self._config, self._scaling = spec.dataset_config, spec.scaling_config
        self._datasets = split.open_datasets(spec.datasets)
        split.check_row_counts(self._datasets, self._config, self._max_workers)
        surroundings = spec.worker_spec.surroundings
        self._is_in_trial = surroundings is not None and surroundings.tune_trial is not None
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

        Afterwards, `notices` has the console lines about it.
        """
        made = split.make_datasets(self._datasets)
        split.check_row_counts(made, self._config, len(node_ids))
        # Once more: what functions have made is known only now.
        lazy = split.list_streamed(made, self._config)
        self._check_cpus(lazy)
        # What hands out the rows of the attempt before would compute on, for nobody.
        self.close()
        local = self._scaling.max_workers == 0
        each = {} if local else self._scaling.bundle
        held = {name: amount * len(node_ids) for name, amount in each.items()}
        left = get_remaining_resources(held) if lazy else {}
        self._shards = split.make_shards(
            made, self._config, node_ids, positions, self._materialized_splits, left
        )
        if self._config.has_custom_split:  # it may have made other ones
            self._check_cpus(split.list_streamed_shards(self._shards))
        self._has_started = True
        before = {
            name: RowPosition.decode(positions.get(split.make_position_key(name)))  # type: ignore[arg-type]  # its own JSON
            for name in self._shards[0]
        }
        self.notices = row_notices.describe_resume(before, self._shards[0], self._config)
        # One object per rank, so that a node fetches no other ranks' shards.
        return self._shards if local else [ray.put(each) for each in self._shards]

    def _check_trial_cpus(self, computed_datasets: Sequence[str]) -> None:
        """Refuse what is computed before the start if the sweep's trials hold every CPU already."""
        if self._is_in_trial:
            check_unreserved_dataset_cpus(computed_datasets)

    def _check_cpus(self, lazy: Sequence[str]) -> None:
        check_dataset_cpus(self._scaling, lazy)
        # A run that goes on rather waits: whoever has come since may go again.
        if not self._has_started and (self._is_in_trial or self._scaling.max_workers):
            check_unreserved_dataset_cpus(lazy)

    def close(self) -> None:
        """End what hands out the rows of the newest attempt's shards."""
        shut_down_streams(self._shards)
        self._shards = []
