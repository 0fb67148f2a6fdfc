"""Dataset shards of a rank and the positions of its data sources."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from drawbar._data.shard import DatasetShard
from drawbar._data.split import fetch_shards, make_position_key
from drawbar._records.events import ShardEpochEnded


class DataSources:
    """Data sources of one rank in one attempt.

    Args:
        shards: Reference to the shards of the rank's datasets, or None.
        positions: Position of each source in the resume checkpoint.
        on_epoch_ended: Callback for each finished epoch of a shard.
        measure_wait: Yields the batches of an iterator and measures the time to wait for them.
    """

    def __init__(
        self,
        shards: object,
        positions: Mapping[str, object],
        on_epoch_ended: Callable[[ShardEpochEnded], None],
        measure_wait: Callable[[Iterable[Any]], Iterator[Any]],
    ) -> None:
        self._measure_wait = measure_wait
        self._on_epoch_ended = on_epoch_ended
        self._shards_ref = shards
        self._lock = threading.RLock()
        self._shards: dict[str, DatasetShard] | None = None
        self._position_callbacks: dict[str, Callable[[], object]] = {}
        self._unclaimed_positions = dict(positions)  # of sources that are not open yet
        self._source_counts = Counter[str]()

    def get_shard(self, name: str) -> DatasetShard:
        """Return the shard of a dataset.

        Raises:
            KeyError: The trainer has no dataset of this name.
        """
        with self._lock:
            if self._shards is None:
                shards = fetch_shards(self._shards_ref)
                for dataset_name, shard in shards.items():
                    self.track_position(make_position_key(dataset_name), shard.encode_position)
                    shard.on_epoch_end = self._on_epoch_ended
                    shard.measure_wait = self._measure_wait
                self._shards = shards
        try:
            return self._shards[name]
        except KeyError:
            names = ", ".join(map(repr, self._shards)) or "none"
            raise KeyError(f"The trainer has no dataset {name!r}; its datasets: {names}.") from None

    def track_position(
        self, name: str, get_position: Callable[[], object], *, add_index: bool = False
    ) -> object:
        """Track the position of a source and return its position in the resume checkpoint.

        See `drawbar.train.backend.register_data_position`.
        """
        with self._lock:
            if add_index:
                self._source_counts[name] += 1
                name = f"{name}-{self._source_counts[name]}"
            self._position_callbacks[name] = get_position
            # Return it only once: a second source of this name starts at its beginning.
            return self._unclaimed_positions.pop(name, None)

    def get_positions(self) -> dict[str, object]:
        """Return the position of every source, including sources that are not open yet.

        Raises:
            TypeError: A position cannot be encoded as JSON.
        """
        with self._lock:
            callbacks = dict(self._position_callbacks)
            unclaimed = dict(self._unclaimed_positions)
        # Without the lock: a callback may wait for a thread that opens a source.
        positions = {name: get_position() for name, get_position in callbacks.items()}
        for name, value in positions.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"The position of data source {name!r} must be JSON-serializable, "
                    f"found {value!r}: {error}."
                ) from None
        known = {name: value for name, value in positions.items() if value is not None}
        # Keep the positions of sources that are not open yet: a checkpoint before their first use
        # would lose them otherwise.
        return {**unclaimed, **known}
