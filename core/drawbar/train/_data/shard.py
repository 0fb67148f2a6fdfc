"""One rank's part of a dataset, which knows how far it has been read.

Ray Data's iterators have no state, and rows come to a rank by whole blocks, so what all ranks have
read is not the beginning of the dataset. But with `preserve_order`, Ray Data splits the same
dataset in the same way each time, so that numbers of rows say what is left; see `_rows.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from drawbar.train._messages import PassEnded
from drawbar.train._row_positions import LocalShuffle, RowPosition, UnevenRows, encode_reads

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """Which part of which dataset a shard is.

    Attributes:
        dataset: Name of the dataset.
        number: Of the part, from 0.
        of: Number of workers that the dataset is split between, 1 if it is not.
        rows: Rows of a whole pass over the part; None if that is not known before one.
        in_all: Rows of the dataset, where the part has them by number; else None.
        uneven_rows: How the parts are made then.
        ordered: Whether the order of the rows is always the same. Otherwise only epochs count.
        alike: Whether all parts have equally many rows, so that none has one if this has none.
    """

    dataset: str
    shard_index: int = 0
    num_shards: int = 1
    num_rows: int | None = None
    total_rows: int | None = None
    uneven_rows: UnevenRows = "drop"
    is_ordered: bool = True
    has_equal_shards: bool = False


class DatasetShard:
    """A rank's `ray.data.DataIterator`; after a restart, its first pass gives what was left.

    The methods `iter_batches`, `iter_torch_batches`, `iter_tf_batches`, `iter_jax_batches` and
    `iter_rows` count what they have handed out. Every other attribute is the iterator's:
    `materialize()` gives the whole part.

    With a `local_shuffle_seed`, each epoch and each rank is shuffled in a way of its own that
    follows from it. A shuffle buffer holds two batches at least: from a smaller one Ray Data gives
    short batches in between, so that ranks with as many rows get different numbers of batches
    (ray-project/ray#66085).

    `iter_arrow_tables()` gives a pass over the blocks; `is_in_object_store` says where they are.

    Args:
        rows: Gives the rank's rows, in the same order in every pass: a `ray.data.DataIterator`, or
            an `MaterializedShard` or `MapStyleShard`, which have its methods.
        part: Which part they are.
        position: Where the first pass begins.
        rest: Gives the rows of that first pass; None for the whole part.
        owners: What must live as long as `rest` is read.
    """

    def __init__(
        self,
        source: Any,
        part: ShardSpec,
        *,
        position: RowPosition | None = None,
        unread_source: Any = None,
        keep_alive: object = None,
    ) -> None:
        self.spec = part
        self.on_epoch_end: Callable[[PassEnded], None] | None = None
        self._source = source
        self._rest = unread_source
        self._keep_alive = keep_alive
        self._start_position = position or RowPosition()
        self._shuffle: LocalShuffle | None = None
        self._num_rows_read = 0
        self._iteration = 0
        self._is_partial_epoch = False

    @property
    def num_shards(self) -> int:
        """Number of workers that the dataset is split between; 1 if each has the whole."""
        return self.spec.num_shards

    def __len__(self) -> int:
        """Give the number of rows of a whole pass, also where the first one gives only a rest."""
        return _require_length(self.spec.num_rows)

    def __bool__(self) -> bool:
        return True

    def is_restarted_from(self, position: RowPosition) -> bool:
        """Return whether rows read before `position` are read again, in a restarted epoch."""
        return len(self._start_position.discarded) > len(position.discarded)

    @property
    def split_coordinators(self) -> list[Any]:
        """The actors of Ray Data that hand out its rows, if it is split."""
        actors = [getattr(each, "_coord_actor", None) for each in (self._source, self._rest)]
        return [each for each in actors if each is not None]

    def encode_position(self) -> dict[str, object]:
        """Say where the rows end that the user has received."""
        return self._start_position.advance(
            self.spec.num_shards, self._num_rows_read, self._shuffle
        ).encode()

    def iter_batches(self, **options: Any) -> Iterable[Any]:
        """As that of `ray.data.DataIterator`."""
        return self._make_iterable("iter_batches", options)

    def iter_torch_batches(self, **options: Any) -> Iterable[Any]:
        """As that of `ray.data.DataIterator`."""
        return self._make_iterable("iter_torch_batches", options)

    def iter_tf_batches(self, **options: Any) -> Iterable[Any]:
        """As that of `ray.data.DataIterator`."""
        return self._make_iterable("iter_tf_batches", options)

    def iter_jax_batches(self, **options: Any) -> Iterable[Any]:
        """As that of `ray.data.DataIterator`."""
        return self._make_iterable("iter_jax_batches", options)

    def iter_rows(self) -> Iterable[dict[str, Any]]:
        """As that of `ray.data.DataIterator`."""
        return self._make_iterable("iter_rows", {})

    def iter_arrow_tables(self) -> Iterable[pa.Table]:
        """Give the rows as Arrow tables of any size: the cheapest way to read each of them once."""
        if hasattr(self._source, "arrow_tables"):
            return self._make_iterable("arrow_tables", {}, tables=True)
        options = {"batch_size": None, "batch_format": "pyarrow"}
        return self._make_iterable("iter_batches", options, tables=True)

    def count(self) -> int:
        """Count the rows of the part; Ray Data computes them for that, if it has to."""
        if self.spec.num_rows is not None:
            return self.spec.num_rows
        rows: int = self._source.materialize().count()
        return rows

    @property
    def is_in_object_store(self) -> bool:
        """Whether the tables that `iter_arrow_tables` gives lie in Ray's object store.

        They stay there, and can be read, as long as anything that is a view of them is used.
        """
        return getattr(self._source, "is_in_object_store", False)

    def _make_iterable(
        self, method: str, options: dict[str, Any], *, tables: bool = False
    ) -> Iterable[Any]:
        reading = replace(
            _IterationOptions.from_call(getattr(self._source, method), options), has_tables=tables
        )
        return _EpochIterable(partial(self._iterate, method, reading), self._count_items(reading))

    def _count_items(self, reading: _IterationOptions) -> int | None:
        """Say how many items a whole pass has, if that is known."""
        if not reading.is_batched or self.spec.num_rows is None:
            return self.spec.num_rows
        if reading.batch_size is None:
            return None
        whole, rest = divmod(self.spec.num_rows, reading.batch_size)
        return whole + (rest > 0 and not reading.options.get("drop_last", False))

    def _iterate(self, method: str, reading: _IterationOptions) -> Iterator[Any]:
        source, options = self._start_epoch(reading)
        this, items, ended, fails = self._iteration, 0, False, False
        counts = self.spec.is_ordered and reading.can_count_rows
        try:
            for batch in getattr(source, method)(**options):
                items += 1
                if this == self._iteration and counts:
                    self._num_rows_read += reading.count_rows(batch)
                yield batch
            ended = True
        finally:
            if this == self._iteration:
                # What is left of an epoch may be nothing.
                empty = (
                    reading.missing_unit
                    if ended and not items and not self._is_partial_epoch
                    else ""
                )
                fails = empty == "row" and self.spec.has_equal_shards
                batches = items if reading.is_batched and not reading.has_tables else 0
                self._end_epoch(batches, ended=ended, counts=counts, empty="" if fails else empty)
        if fails:
            raise ValueError(_describe_no_rows(self.spec))

    def _start_epoch(self, reading: _IterationOptions) -> tuple[Any, dict[str, Any]]:
        """Give what this pass reads, and how."""
        source: Any = self._source if self._rest is None else self._rest
        is_rest = self._is_partial_epoch = self._rest is not None
        self._rest = None
        self._iteration += 1
        self._num_rows_read, self._shuffle = 0, reading.shuffle
        options = dict(reading.options)
        if reading.shuffle is not None:
            options |= reading.shuffle.make_iterator_options(
                self._start_position.epoch, self.spec.shard_index
            )
            if is_rest and self._start_position.is_continued_by(
                self.spec.num_shards, reading.shuffle
            ):
                # It lies in the order of this very shuffle already.
                del options["local_shuffle_seed"], options["local_shuffle_buffer_size"]
        return source, options

    def _end_epoch(self, batches: int, *, ended: bool, counts: bool, empty: str) -> None:
        position = self._start_position
        if self.on_epoch_end is not None:
            self.on_epoch_end(
                PassEnded(
                    dataset=self.spec.dataset,
                    epoch=position.epoch,
                    before=encode_reads(position.rows_read),
                    discarded=[encode_reads(each) for each in position.discarded],
                    part=self.spec.shard_index,
                    parts=self.spec.num_shards,
                    rows=self._num_rows_read if counts else None,
                    batches=batches,
                    shuffled=self._shuffle is not None,
                    ended=ended,
                    in_all=self.spec.total_rows,
                    uneven_rows=self.spec.uneven_rows,
                    empty=empty,
                )
            )
        self._start_position = self._start_position.advance_epoch(
            was_incomplete=not ended and not self._is_partial_epoch
        )
        self._num_rows_read, self._shuffle = 0, None
        self._keep_alive = None

    def __getattr__(self, name: str) -> Any:
        if name == "_source":  # not set yet: this object is being unpickled
            raise AttributeError(name)
        return getattr(self._source, name)

    def __repr__(self) -> str:
        return f"DatasetShard({self._source!r}, {self.encode_position()})"


class _EpochIterable:
    """Each iteration is a new pass, as with Ray Data's own. `len()` is that of a whole one."""

    def __init__(self, begin: Callable[[], Iterator[Any]], items: int | None) -> None:
        self._begin = begin
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._begin()

    def __len__(self) -> int:
        return _require_length(self._items)

    def __bool__(self) -> bool:
        return True


def _describe_no_rows(part: ShardSpec) -> str:
    if part.num_shards == 1:
        return f"datasets[{part.dataset!r}] has no rows"
    return (
        f"datasets[{part.dataset!r}] has fewer rows than there are workers, {part.num_shards}: "
        "none gets "
        "one, since all get equally many; start fewer workers, or set DataConfig.uneven_rows"
    )


def _require_length(length: int | None) -> int:
    if length is None:
        raise TypeError(
            "this shard's length is not known before it has been read; give the trainer a "
            "dataset that is materialized, by ray.data.Dataset.materialize()"
        )
    return length


@dataclass(frozen=True)
class _IterationOptions:
    """How a pass reads: what a method of Ray Data's was asked for, or has by default.

    Attributes:
        counts: Whether it is known which rows an item stands for.
        shuffle: The local shuffle, if it can be had again.
        tables: Whether the items are tables of any size, which are nobody's batches.
    """

    options: dict[str, Any]
    is_batched: bool
    batch_size: int | None
    can_count_rows: bool
    shuffle: LocalShuffle | None
    has_tables: bool = False

    @staticmethod
    def from_call(method: Callable[..., Any], given: Mapping[str, Any]) -> _IterationOptions:
        parameters = inspect.signature(method).parameters
        options = dict(given)
        if "batch_size" not in parameters:
            return _IterationOptions(options, method.__name__ != "iter_rows", None, True, None)
        batch_size = options.get("batch_size", parameters["batch_size"].default)
        if not isinstance(batch_size, int):
            return _IterationOptions(options, True, None, not options.get("collate_fn"), None)
        shuffle = None
        buffer, seed = options.get("local_shuffle_buffer_size"), options.get("local_shuffle_seed")
        if buffer:
            options["local_shuffle_buffer_size"] = buffer = max(buffer, 2 * batch_size)
            shuffle = None if seed is None else LocalShuffle(buffer, batch_size, seed)
        return _IterationOptions(
            options, True, batch_size, not buffer or shuffle is not None, shuffle
        )

    @property
    def missing_unit(self) -> str:
        """What there is none of where a pass gives nothing: "row", or only "batch"."""
        return "batch" if self.options.get("drop_last") else "row"

    def count_rows(self, item: Any) -> int:
        """Count the rows of one item of the pass."""
        if not self.is_batched:
            return 1
        if self.batch_size is None:
            return _count_rows(item)
        collated = isinstance(item, list) or "collate_fn" in self.options
        if collated or not isinstance(item, Sized):
            return self.batch_size
        return min(self.batch_size, _count_rows(item))


def _count_rows(batch: Sized) -> int:
    if isinstance(batch, Mapping):
        return len(next(iter(batch.values()), ()))
    return len(batch)
