"""Where a rank's data comes from, and how far it has been consumed."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping

from drawbar.train._data.shard import DatasetShard
from drawbar.train._data.split import fetch_shards, make_position_key
from drawbar.train._messages import PassEnded


class DataSources:
    """The data sources of one rank in one attempt.

    Args:
        shards: Refers to the shards of its datasets, if any.
        positions: How far each source was consumed at the checkpoint that the attempt goes on from.
        tell: Hears of each pass over a shard that is over.
    """

    def __init__(
        self,
        shards: object,
        positions: Mapping[str, object],
        on_epoch_ended: Callable[[PassEnded], None],
    ) -> None:
        self._tell = on_epoch_ended
        self._shards_ref = shards
        self._lock = threading.RLock()
        self._shards: dict[str, DatasetShard] | None = None
        self._position_callbacks: dict[str, Callable[[], object]] = {}
        self._unclaimed_positions = dict(positions)  # of sources not opened yet
        self._source_counts = Counter[str]()

    def get_shard(self, name: str) -> DatasetShard:
        """Do what `drawbar.train.get_dataset_shard` says."""
        with self._lock:
            if self._shards is None:
                shards = fetch_shards(self._shards_ref)
                for each, shard in shards.items():
                    self.track_position(make_position_key(each), shard.encode_position)
                    shard.on_epoch_end = self._tell
                self._shards = shards
        try:
            return self._shards[name]
        except KeyError:
            names = ", ".join(map(repr, self._shards)) or "none"
            raise KeyError(
                f"the trainer was given no dataset {name!r}; its datasets: {names}"
            ) from None

    def track_position(
        self, name: str, position: Callable[[], object], *, add_index: bool = False
    ) -> object:
        """Do what `drawbar.train.backend.register_data_position` says."""
        with self._lock:
            if add_index:
                self._source_counts[name] += 1
                name = f"{name}-{self._source_counts[name]}"
            self._position_callbacks[name] = position
            # Given out once: a second source of this name begins at its start.
            return self._unclaimed_positions.pop(name, None)

    def get_positions(self) -> dict[str, object]:
        """Give the position of every source, also of those that are not opened again yet.

        Raises:
            TypeError: One cannot be written as JSON.
        """
        with self._lock:
            sources, left = dict(self._position_callbacks), dict(self._unclaimed_positions)
        # Outside the lock: it is code of others, and may wait for a thread that opens a source.
        positions = {name: position() for name, position in sources.items()}
        for name, value in positions.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"the position of the data source {name!r} goes into the checkpoint's "
                    f"manifest, which is JSON, but {error}; found {value!r}"
                ) from None
        known = {name: value for name, value in positions.items() if value is not None}
        # What is not opened again yet keeps its place, which a checkpoint before its first use
        # would lose otherwise.
        return {**left, **known}
