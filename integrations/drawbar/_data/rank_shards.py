"""`RankShards`: open the shards of a rank in its process."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from drawbar._data.shard import DatasetShard
from drawbar._data.split import make_position_key
from drawbar.train._worker.active_session import current_session


@dataclass(frozen=True)
class RankShards:
    """Shards of a rank, which report their positions, epochs, and waiting times when opened.

    Attributes:
        shards: The shards by dataset name, or a reference to them in Ray's object store.
    """

    shards: Any

    def __call__(self) -> Mapping[str, DatasetShard]:
        """Return the shards by dataset name. Called by the rank."""
        session = current_session("get_dataset_shard")
        for name, shard in (shards := self._fetch()).items():
            session.data_sources.track_position(make_position_key(name), shard.encode_position)
            shard.on_epoch_end = session.send_epoch_ended
            shard.measure_wait = partial(session.timer.measure_items, "data_wait")
        return shards

    def _fetch(self) -> dict[str, DatasetShard]:
        if isinstance(self.shards, dict):
            return self.shards
        import ray

        shards: dict[str, DatasetShard] = ray.get(self.shards)
        return shards
