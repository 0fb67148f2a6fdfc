"""`DatasetShard`: the rows of one rank, and how far they have been read.

Ray Data's iterators have no state, and ranks receive rows in whole blocks, so the rows that all
ranks have read are not the beginning of the dataset. However, with `preserve_order` Ray Data always
splits a dataset in the same way, so row counts determine the unread rows; see
`row_positions.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from drawbar._base.ray_compat import get_split_coordinator
from drawbar._data.dictionaries import explain_combine_error
from drawbar._data.row_positions import LocalShuffle, RowPosition, encode_reads
from drawbar._records.events import ShardEpochEnded, UnevenRows

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class ShardSpec:
    """Description of a shard: its dataset, index, and number of rows.

    Attributes:
        dataset: Name of the dataset.
        shard_index: Index of the shard, from 0.
        num_shards: Number of workers between which the dataset is split, 1 if it is not split.
        num_rows: Rows of a complete epoch over the shard; None if unknown.
        total_rows: Rows of the dataset if it is split by row number, else None.
        uneven_rows: How the dataset is split by row number.
        is_ordered: Whether the order of the rows is always the same. If not, only complete epochs
            are counted.
        has_equal_shards: Whether all shards have the same number of rows, so that either all or
            none are empty.
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
    """A rank's `ray.data.DataIterator` that resumes from unread rows after a restart.

    The methods `iter_batches`, `iter_torch_batches`, `iter_tf_batches`, `iter_jax_batches`, and
    `iter_rows` count the rows that they have returned. All other attributes belong to the
    iterator; `materialize()`, for example, returns the complete shard.

    With a `local_shuffle_seed`, each epoch and each rank has a different order that depends on the
    seed. A shuffle buffer holds at least two batches: with a smaller one, Ray Data returns short
    batches in between, so that ranks with the same number of rows get different numbers of batches
    (ray-project/ray#66085).

    Args:
        source: The rank's rows, in the same order in every epoch: a `ray.data.DataIterator`, or a
            `MaterializedShard` or `MapStyleShard`, which have the same methods.
        part: Description of the shard.
        position: Position at which the first epoch starts.
        unread_source: Rows of the first epoch; None for the complete shard.
        keep_alive: Objects that must stay alive while `unread_source` is read.

    Attributes:
        spec: Description of the shard.
        start_position: Position at which the current epoch started.
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
        self.on_epoch_end: Callable[[ShardEpochEnded], None] | None = None
        self.measure_wait: Callable[[Iterable[Any]], Iterator[Any]] = iter
        self._source = source
        self._unread_source = unread_source
        self._keep_alive = keep_alive
        self.start_position = position or RowPosition()
        self._shuffle: LocalShuffle | None = None
        self._num_rows_read = 0
        self._iteration = 0
        self._is_partial_epoch = False

    @property
    def num_shards(self) -> int:
        """Number of workers between which the dataset is split; 1 if it is not split."""
        return self.spec.num_shards

    def __len__(self) -> int:
        """Return the number of rows of a complete epoch, even if the first one is partial."""
        return _require_length(self.spec.num_rows)

    def __bool__(self) -> bool:
        return True

    @property
    def split_coordinators(self) -> list[Any]:
        """Ray Data's actors that distribute the rows, if the dataset is split by streaming."""
        sources = (self._source, self._unread_source)
        actors = [get_split_coordinator(source) for source in sources]
        return [actor for actor in actors if actor is not None]

    def encode_position(self) -> dict[str, object]:
        """Return the position after the rows that the user has received."""
        return self.start_position.advance(
            self.spec.num_shards, self._num_rows_read, self._shuffle
        ).encode()

    def iter_batches(self, **options: Any) -> Iterable[Any]:
        """Iterate like `ray.data.DataIterator.iter_batches`."""
        return self._make_iterable("iter_batches", options)

    def iter_torch_batches(self, **options: Any) -> Iterable[Any]:
        """Iterate like `ray.data.DataIterator.iter_torch_batches`."""
        return self._make_iterable("iter_torch_batches", options)

    def iter_tf_batches(self, **options: Any) -> Iterable[Any]:
        """Iterate like `ray.data.DataIterator.iter_tf_batches`."""
        return self._make_iterable("iter_tf_batches", options)

    def iter_jax_batches(self, **options: Any) -> Iterable[Any]:
        """Iterate like `ray.data.DataIterator.iter_jax_batches`."""
        return self._make_iterable("iter_jax_batches", options)

    def iter_rows(self) -> Iterable[dict[str, Any]]:
        """Iterate like `ray.data.DataIterator.iter_rows`."""
        return self._make_iterable("iter_rows", {})

    def iter_arrow_tables(self) -> Iterable[pa.Table]:
        """Iterate over Arrow tables of any size, the cheapest way to read every row once."""
        if hasattr(self._source, "iter_arrow_tables"):
            return self._make_iterable("iter_arrow_tables", {}, tables=True)
        options = {"batch_size": None, "batch_format": "pyarrow"}
        return self._make_iterable("iter_batches", options, tables=True)

    def count(self) -> int:
        """Count the rows of the shard, materializing it if necessary."""
        if self.spec.num_rows is not None:
            return self.spec.num_rows
        rows: int = self._source.materialize().count()
        return rows

    @property
    def is_in_object_store(self) -> bool:
        """True if the tables of `iter_arrow_tables` are stored in Ray's object store.

        They stay there as long as a view of them is in use.
        """
        return getattr(self._source, "is_in_object_store", False)

    def _make_iterable(
        self, method: str, options: dict[str, Any], *, tables: bool = False
    ) -> Iterable[Any]:
        reading = replace(
            _IterationOptions.from_call(getattr(self._source, method), options), has_tables=tables
        )
        return _EpochIterable(
            partial(self._iterate, method, reading), reading.count_items(self.spec.num_rows)
        )

    def _iterate(self, method: str, reading: _IterationOptions) -> Iterator[Any]:
        source, options = self._start_epoch(reading)
        iteration, items, ended, fails = self._iteration, 0, False, False
        counts = self.spec.is_ordered and reading.can_count_rows
        try:
            for batch in self.measure_wait(getattr(source, method)(**options)):
                items += 1
                if iteration == self._iteration and counts:
                    self._num_rows_read += reading.count_rows(batch)
                yield batch
            ended = True
        except Exception as error:
            if (explained := explain_combine_error(error, self.spec.dataset, source)) is not None:
                raise explained from error
            raise
        finally:
            if iteration == self._iteration:
                # A partial epoch may have no rows, which is not an error.
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
        """Return the source of this epoch and the options to read it with."""
        source: Any = self._source if self._unread_source is None else self._unread_source
        is_partial = self._is_partial_epoch = self._unread_source is not None
        self._unread_source = None
        self._iteration += 1
        self._num_rows_read, self._shuffle = 0, reading.shuffle
        options = dict(reading.options)
        if reading.shuffle is not None:
            options |= reading.shuffle.make_iterator_options(
                self.start_position.epoch, self.spec.shard_index
            )
            if is_partial and self.start_position.is_continued_by(
                self.spec.num_shards, reading.shuffle
            ):
                # The unread rows are already in the order of this shuffle.
                del options["local_shuffle_seed"], options["local_shuffle_buffer_size"]
        return source, options

    def _end_epoch(self, batches: int, *, ended: bool, counts: bool, empty: str) -> None:
        position = self.start_position
        if self.on_epoch_end is not None:
            self.on_epoch_end(
                ShardEpochEnded(
                    dataset=self.spec.dataset,
                    epoch=position.epoch,
                    previous_reads=encode_reads(position.rows_read),
                    discarded=[encode_reads(reads) for reads in position.discarded],
                    shard_index=self.spec.shard_index,
                    num_shards=self.spec.num_shards,
                    num_rows=self._num_rows_read if counts else None,
                    num_batches=batches,
                    is_shuffled=self._shuffle is not None,
                    is_complete=ended,
                    total_rows=self.spec.total_rows,
                    uneven_rows=self.spec.uneven_rows,
                    missing_unit=empty,
                )
            )
        self.start_position = self.start_position.advance_epoch(
            was_incomplete=not ended and not self._is_partial_epoch
        )
        self._num_rows_read, self._shuffle = 0, None
        self._keep_alive = None

    def __getattr__(self, name: str) -> Any:
        if name == "_source":  # not set yet while this object is unpickled
            raise AttributeError(name)
        return getattr(self._source, name)

    def __repr__(self) -> str:
        return f"DatasetShard({self._source!r}, {self.encode_position()})"


class _EpochIterable:
    """Iterable that starts a new epoch for each iteration; `len()` counts a complete epoch."""

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
        f"datasets[{part.dataset!r}] has fewer rows than there are workers ({part.num_shards}). "
        'Start fewer workers, or set DataConfig.uneven_rows to "pad" or "keep"'
    )


def _require_length(length: int | None) -> int:
    if length is None:
        raise TypeError(
            "the length of this shard is unknown. If its dataset is streamed, pass "
            "dataset.materialize() to the trainer instead of the dataset"
        )
    return length


@dataclass(frozen=True)
class _IterationOptions:
    """Options of one iteration: arguments of a Ray Data method and its defaults.

    Attributes:
        options: Keyword arguments of the method.
        is_batched: Whether the items are batches.
        batch_size: Rows of a batch, None if unknown.
        can_count_rows: Whether the rows of each item are known.
        shuffle: Local shuffle, if it can be reproduced.
        has_tables: Whether the items are tables of any size instead of batches.
    """

    options: dict[str, Any]
    is_batched: bool
    batch_size: int | None
    can_count_rows: bool
    shuffle: LocalShuffle | None
    has_tables: bool = False

    @staticmethod
    def from_call(method: Callable[..., Any], arguments: Mapping[str, Any]) -> _IterationOptions:
        """Return the options of a call of a method with keyword arguments."""
        parameters = inspect.signature(method).parameters
        options = dict(arguments)
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
        """Unit that is missing if an epoch is empty: "row", or "batch" with `drop_last`."""
        return "batch" if self.options.get("drop_last") else "row"

    def count_items(self, num_rows: int | None) -> int | None:
        """Return the number of items of a complete epoch, None if it is unknown."""
        if not self.is_batched or num_rows is None:
            return num_rows
        if self.batch_size is None:
            return None
        num_batches, num_rows_left = divmod(num_rows, self.batch_size)
        return num_batches + (num_rows_left > 0 and not self.options.get("drop_last", False))

    def count_rows(self, item: Any) -> int:
        """Count the rows of one item."""
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
