"""The datasets of a run: opened once, and split anew for each attempt."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import ray

from drawbar.train._controller.run import RunSpec
from drawbar.train._data import preprocessing, row_notices, split
from drawbar.train._data.exact_split import ExactSplits
from drawbar.train._data.shard import DatasetShard
from drawbar.train._data.streams import end_streams
from drawbar.train._group.cluster import (
    check_data,
    check_data_beside_others,
    connect_to_ray,
    left_beside,
)
from drawbar.train._rows import RowPosition

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
        self._datasets = split.opened(spec.datasets)
        split.check_rows(self._datasets, self._config, self._most_workers)
        surroundings = spec.worker.surroundings
        self._in_trial = surroundings is not None and surroundings.trial is not None
        self._check_trial(split.computed(self._datasets, self._config))
        self.fitted: Preprocessor | None = None
        if self._config.preprocessor is not None:
            if not preprocessing.is_fitted(self._config.preprocessor):
                self._check_trial(list(self._datasets))
            self.fitted = preprocessing.fitted(self._config.preprocessor, self._datasets)
            self._datasets = preprocessing.applied(self.fitted, self._datasets)
        sizes = range(max(self._scaling.min_workers, 1), self._most_workers + 1)
        check_data(self._scaling, split.lazy(self._datasets, self._config))
        self._exact = ExactSplits()
        chosen = split.made(split.exactly_split(self._datasets, self._config))
        self._check_trial(split.computed(chosen, self._config))
        split.split_exactly(chosen, self._config, sizes, self._exact)
        self._in_use: list[dict[str, DatasetShard]] = []
        self._begun = False
        self.notices: list[str] = []

    @property
    def _most_workers(self) -> int:
        return max(self._scaling.max_workers, 1)

    def describe_left_out(self) -> list[str]:
        """Return a console line for each dataset whose rows are left out."""
        return row_notices.describe_left_out(self._datasets, self._config, self._most_workers)

    def shards(
        self, node_ids: Sequence[str], positions: Mapping[str, object]
    ) -> Sequence[dict[str, DatasetShard] | ray.ObjectRef[dict[str, DatasetShard]]]:
        """Split the datasets between the ranks on these nodes, from their data positions.

        Afterwards, `notices` has the console lines about it.
        """
        made = split.made(self._datasets)
        split.check_rows(made, self._config, len(node_ids))
        # Once more: what functions have made is known only now.
        lazy = split.lazy(made, self._config)
        self._check_cpus(lazy)
        # What hands out the rows of the attempt before would compute on, for nobody.
        self.close()
        local = self._scaling.max_workers == 0
        each = {} if local else self._scaling.bundle
        held = {name: amount * len(node_ids) for name, amount in each.items()}
        left = left_beside(held) if lazy else {}
        self._in_use = split.shard(made, self._config, node_ids, positions, self._exact, left)
        if self._config.is_configured:  # it may have made other ones
            self._check_cpus(split.lazily_read(self._in_use))
        self._begun = True
        before = {
            name: RowPosition.decode(positions.get(split.position_name(name)))  # type: ignore[arg-type]  # its own JSON
            for name in self._in_use[0]
        }
        self.notices = row_notices.describe_resume(before, self._in_use[0], self._config)
        # One object per rank, so that a node fetches no other ranks' shards.
        return self._in_use if local else [ray.put(each) for each in self._in_use]

    def _check_trial(self, computed: Sequence[str]) -> None:
        """Refuse what is computed before the start if the sweep's trials hold every CPU already."""
        if self._in_trial:
            check_data_beside_others(computed)

    def _check_cpus(self, lazy: Sequence[str]) -> None:
        check_data(self._scaling, lazy)
        # A run that goes on rather waits: whoever has come since may go again.
        if not self._begun and (self._in_trial or self._scaling.max_workers):
            check_data_beside_others(lazy)

    def close(self) -> None:
        """End what hands out the rows of the newest attempt's shards."""
        end_streams(self._in_use)
        self._in_use = []
