"""Check that all ranks read the same number of batches per epoch."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from drawbar._records.events import ShardEpochEnded


@dataclass
class _EpochCounts:
    """Counts of the latest epoch of a dataset.

    Attributes:
        number: Number of the epoch.
        ended: Shard epochs, by rank.
        ranks_without_rows: Ranks that received no row.
        num_ranks: Number of ranks, by their number of batches.
    """

    number: int
    ended: dict[int, ShardEpochEnded] = field(default_factory=dict)
    ranks_without_rows: set[int] = field(default_factory=set)
    num_ranks: Counter[int] = field(default_factory=Counter)

    def add(self, rank: int, shard_epoch: ShardEpochEnded) -> None:
        """Add the shard epoch of a rank. It replaces an earlier one."""
        previous = self.ended.get(rank)
        if previous is not None:
            self.num_ranks[previous.num_batches] -= 1
            self.ranks_without_rows.discard(rank)
        self.ended[rank] = shard_epoch
        self.num_ranks[shard_epoch.num_batches] += 1
        if shard_epoch.missing_unit == "row":
            self.ranks_without_rows.add(rank)

    def find_rank_with_other_count(self, batches: int) -> int | None:
        """Return the lowest rank that read another number of batches, other than 0."""
        # Do not look at each rank in the common case.
        if self.num_ranks[batches] + self.num_ranks[0] == len(self.ended):
            return None
        return min(
            rank for rank, ended in self.ended.items() if ended.num_batches not in (0, batches)
        )


class BatchCountCheck:
    """Compare the number of batches that the ranks of an attempt read per epoch.

    If all ranks synchronize at every batch, a rank that reads one batch more than another waits
    forever.

    Args:
        world_size: Number of ranks.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._latest_epochs: dict[str, _EpochCounts] = {}
        self._warned: set[tuple[str, str]] = set()

    def add(self, rank: int, shard_epoch: ShardEpochEnded) -> str:
        """Add an epoch that a rank has finished.

        Returns:
            Warning for the user, once per dataset; "" if there is none.

        Raises:
            ValueError: No rank received a row.
        """
        if not shard_epoch.is_complete:
            return ""
        epoch = self._latest_epochs.get(shard_epoch.dataset)
        if epoch is None or epoch.number < shard_epoch.epoch:
            epoch = self._latest_epochs[shard_epoch.dataset] = _EpochCounts(shard_epoch.epoch)
        if epoch.number > shard_epoch.epoch:
            return ""
        epoch.add(rank, shard_epoch)
        if len(epoch.ranks_without_rows) == self._world_size:
            raise ValueError(f"no rank received a row of {_format_dataset_epoch(shard_epoch)}")
        if shard_epoch.missing_unit:
            dataset_epoch = _format_dataset_epoch(shard_epoch)
            text = f"Rank {rank} received no {shard_epoch.missing_unit} of {dataset_epoch}."
            return self._format_once("empty", shard_epoch, text)
        return self._check_counts(rank, shard_epoch, epoch)

    def _check_counts(self, rank: int, shard_epoch: ShardEpochEnded, epoch: _EpochCounts) -> str:
        if (
            shard_epoch.num_shards == 1
            or shard_epoch.uneven_rows == "keep"
            or not shard_epoch.num_batches
        ):
            return ""
        if ("unequal", shard_epoch.dataset) in self._warned:
            return ""
        other_rank = epoch.find_rank_with_other_count(shard_epoch.num_batches)
        if other_rank is None:
            return ""
        return self._format_once(
            "unequal",
            shard_epoch,
            f"Rank {other_rank} read {epoch.ended[other_rank].num_batches} batches of "
            f"{_format_dataset_epoch(shard_epoch)}, but rank {rank} read "
            f"{shard_epoch.num_batches}. If the ranks synchronize at every batch, a rank with more "
            "batches waits forever. Set the same batch_size on all ranks and give them the same "
            "number of rows. If the numbers of batches may differ, set "
            'DataConfig(uneven_rows="keep").',
        )

    def _format_once(self, kind: str, shard_epoch: ShardEpochEnded, text: str) -> str:
        if (kind, shard_epoch.dataset) in self._warned:
            return ""
        self._warned.add((kind, shard_epoch.dataset))
        return text

    def describe_ranks_ahead(self) -> str:
        """Return a line for each epoch that only some ranks have finished; the others may hang."""
        lines = []
        for name, epoch in self._latest_epochs.items():
            num_shards = next(iter(epoch.ended.values())).num_shards
            if num_shards > 1 and len(epoch.ended) < self._world_size:
                ranks = [
                    f"rank {rank} ({ended.num_batches} batches)"
                    for rank, ended in sorted(epoch.ended.items())
                ]
                lines.append(
                    f"\n  ranks that have finished epoch {epoch.number} of datasets[{name!r}]: "
                    + ", ".join(ranks)
                )
        return "".join(lines)


def _format_dataset_epoch(shard_epoch: ShardEpochEnded) -> str:
    return f"datasets[{shard_epoch.dataset!r}] in epoch {shard_epoch.epoch}"
