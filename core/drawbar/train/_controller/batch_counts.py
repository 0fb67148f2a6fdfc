"""Passes over datasets in which the ranks differ, where none of the rows' numbers tells before."""

from __future__ import annotations

from dataclasses import dataclass, field

from drawbar.train._messages import PassEnded


@dataclass
class _EpochCounts:
    """The newest epoch of a dataset that a rank is through with: by rank, its pass."""

    number: int
    ended: dict[int, PassEnded] = field(default_factory=dict)


class BatchCountCheck:
    """What the ranks of an attempt have read of their datasets, as far as that sets them apart.

    A rank that gets a batch more than another one waits in it for ever, where batches are steps
    that all ranks take together.

    Args:
        ranks: How many ranks there are.
    """

    def __init__(self, world_size: int) -> None:
        self._ranks = world_size
        self._latest_epochs: dict[str, _EpochCounts] = {}
        self._warned: set[tuple[str, str]] = set()

    def add(self, rank: int, passed: PassEnded) -> str:
        """Take a pass that is over; gives what the user should know, once per dataset.

        Raises:
            ValueError: None of the ranks has got a row.
        """
        if not passed.ended:
            return ""
        epoch = self._latest_epochs.get(passed.dataset)
        if epoch is None or epoch.number < passed.epoch:
            epoch = self._latest_epochs[passed.dataset] = _EpochCounts(passed.epoch)
        if epoch.number > passed.epoch:
            return ""
        epoch.ended[rank] = passed
        rowless = [each for each in epoch.ended.values() if each.empty == "row"]
        if len(rowless) == self._ranks:
            raise ValueError(f"no rank got a row of {_format_dataset_epoch(passed)}")
        if passed.empty:
            text = f"rank {rank} got no {passed.empty} of {_format_dataset_epoch(passed)}"
            return self._format_once("empty", passed, text)
        return self._check_counts(rank, passed, epoch)

    def _check_counts(self, rank: int, passed: PassEnded, epoch: _EpochCounts) -> str:
        if passed.parts == 1 or passed.uneven_rows == "keep" or not passed.batches:
            return ""
        for other, each in sorted(epoch.ended.items()):
            if each.batches and each.batches != passed.batches:
                return self._format_once(
                    "unequal",
                    passed,
                    f"rank {other} got {each.batches} batches of {_format_dataset_epoch(passed)} "
                    f"and rank {rank} "
                    f"{passed.batches}: workers that wait for each other at each batch hang then. "
                    "Set a batch_size, the same on all, and give them equally many rows; "
                    'DataConfig(uneven_rows="keep") says that they may differ',
                )
        return ""

    def _format_once(self, kind: str, passed: PassEnded, text: str) -> str:
        if (kind, passed.dataset) in self._warned:
            return ""
        self._warned.add((kind, passed.dataset))
        return text

    def describe_ranks_ahead(self) -> str:
        """Say which ranks are through with an epoch that others are in: why those may hang."""
        lines = []
        for name, epoch in self._latest_epochs.items():
            one = next(iter(epoch.ended.values()))
            if one.parts > 1 and len(epoch.ended) < self._ranks:
                through = [
                    f"rank {rank} after {each.batches} batches"
                    for rank, each in sorted(epoch.ended.items())
                ]
                lines.append(
                    f"\n  through with epoch {epoch.number} of datasets[{name!r}] are only "
                    + ", ".join(through)
                )
        return "".join(lines)


def _format_dataset_epoch(passed: PassEnded) -> str:
    return f"datasets[{passed.dataset!r}] in epoch {passed.epoch}"
