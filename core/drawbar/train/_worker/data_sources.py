"""Shards of a rank and the positions of its data sources."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from drawbar._process.serialization import Serialized
from drawbar.train._config.data_source import OpenShards


class DataSources:
    """Data sources of one rank in one attempt.

    Args:
        open_shards: Returns the shards of the rank; None if the trainer has no datasets.
        positions: Position of each source in the resume checkpoint.
    """

    def __init__(
        self,
        open_shards: OpenShards | Serialized | None,
        positions: Mapping[str, object],
    ) -> None:
        self._open_shards = open_shards
        self._lock = threading.RLock()
        self._shards: Mapping[str, Any] | None = None
        self._shard_sources: set[str] = set()  # positions that the shards have registered
        self._position_callbacks: dict[str, Callable[[], object]] = {}
        self._skip_callbacks: dict[str, Callable[[int], object]] = {}
        self._read_ahead: list[Callable[[], Mapping[str, object]]] = []
        self._unclaimed_positions = dict(positions)  # of sources that are not open yet
        self._source_counts = Counter[str]()

    def get_shard(self, name: str) -> Any:
        """Return the shard of a dataset.

        Raises:
            KeyError: The trainer has no dataset of this name.
        """
        with self._lock:
            if self._shards is None:
                open_shards = self._open_shards
                if isinstance(open_shards, Serialized):
                    open_shards = open_shards.deserialize()
                earlier = set(self._position_callbacks)
                self._shards = {} if open_shards is None else open_shards()
                self._shard_sources = self._position_callbacks.keys() - earlier
        try:
            return self._shards[name]
        except KeyError:
            names = ", ".join(map(repr, self._shards)) or "none"
            raise KeyError(f"The trainer has no dataset {name!r}; its datasets: {names}.") from None

    def track_position(
        self,
        name: str,
        get_position: Callable[[], object],
        *,
        add_index: bool = False,
        skip_batches: Callable[[int], object] | None = None,
    ) -> object:
        """Track the position of a source and return its position in the resume checkpoint.

        See `drawbar.train.backend.register_data_position`.
        """
        with self._lock:
            if add_index:
                self._source_counts[name] += 1
                name = f"{name}-{self._source_counts[name]}"
            self._position_callbacks[name] = get_position
            if skip_batches is not None:
                self._skip_callbacks[name] = skip_batches
            # Return it only once: a second source of this name starts at its beginning.
            return self._unclaimed_positions.pop(name, None)

    def get_positions_after(self, skip: int) -> dict[str, object]:
        """Return the positions after so many further batches, for a rollback.

        Raises:
            RuntimeError: A source cannot skip batches, or there is no source.
        """
        with self._lock:
            unsupported = self._position_callbacks.keys() - self._skip_callbacks.keys()
            # Shards without a position cannot skip batches either.
            can_skip = self._shard_sources and not self._shard_sources & unsupported
            shards = () if can_skip else self._shards or ()
            fixed = sorted({*shards, *(unsupported - self._shard_sources)})
            skips = dict(self._skip_callbacks)
        if fixed or not skips:
            raise RuntimeError(
                "rollback() can skip batches only in a loop over a data loader of "
                "drawbar.torch.prepare_data_loader() or a source with skip_batches=, not of a "
                "dataset of the trainer or of a framework's trainer; found "
                f"{', '.join(map(repr, fixed)) or 'no data loader'}. "
                "Iterate over a prepared loader, or restart the run with other data."
            )
        return {**self.get_positions(), **{name: get(skip) for name, get in skips.items()}}

    def track_read_ahead(
        self, get_previous: Callable[[], Mapping[str, object]]
    ) -> Callable[[], dict[str, object]]:
        """Save earlier positions of some sources. See `backend.register_read_ahead`."""
        self._read_ahead.append(get_previous)
        return self._get_current_positions

    def get_positions(self) -> dict[str, object]:
        """Return the position of every source, including sources that are not open yet.

        Raises:
            TypeError: A position cannot be encoded as JSON.
        """
        positions = self._get_current_positions()
        for get_previous in self._read_ahead:
            positions |= get_previous()
        for name, value in positions.items():
            try:
                json.dumps(value)
            except (TypeError, ValueError) as error:
                raise TypeError(
                    f"The position of data source {name!r} must be JSON-serializable, "
                    f"found {value!r}: {error}."
                ) from None
        return {name: value for name, value in positions.items() if value is not None}

    def _get_current_positions(self) -> dict[str, object]:
        with self._lock:
            callbacks = dict(self._position_callbacks)
            unclaimed = dict(self._unclaimed_positions)
        # Without the lock: a callback may wait for a thread that opens a source.
        positions = {name: get_position() for name, get_position in callbacks.items()}
        known = {name: value for name, value in positions.items() if value is not None}
        # Keep the positions of sources that are not open yet: a checkpoint before their first use
        # would lose them otherwise.
        return {**unclaimed, **known}
