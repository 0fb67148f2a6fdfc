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
from drawbar.train._rows import Equalize, RowPosition, Shuffle, encode_reads

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, kw_only=True)
class Part:
    """Which part of which dataset a shard is.

    Attributes:
        dataset: Name of the dataset.
        number: Of the part, from 0.
        of: Number of workers that the dataset is split between, 1 if it is not.
        rows: Rows of a whole pass over the part; None if that is not known before one.
        in_all: Rows of the dataset, where the part has them by number; else None.
        equalize: How the parts are made then.
        ordered: Whether the order of the rows is always the same. Otherwise only epochs count.
        alike: Whether all parts have equally many rows, so that none has one if this has none.
    """

    dataset: str
    number: int = 0
    of: int = 1
    rows: int | None = None
    in_all: int | None = None
    equalize: Equalize = "drop"
    ordered: bool = True
    alike: bool = False


class DatasetShard:
    """A rank's `ray.data.DataIterator`; after a restart, its first pass gives what was left.

    The methods `iter_batches`, `iter_torch_batches`, `iter_tf_batches`, `iter_jax_batches` and
    `iter_rows` count what they have handed out. Every other attribute is the iterator's:
    `materialize()` gives the whole part.

    With a `local_shuffle_seed`, each epoch and each rank is shuffled in a way of its own that
    follows from it. A shuffle buffer holds two batches at least: from a smaller one Ray Data gives
    short batches in between, so that ranks with as many rows get different numbers of batches
    (ray-project/ray#66085).

    `arrow_tables()` gives a pass over the blocks; `in_object_store` says where they are.

    Args:
        rows: Gives the rank's rows, in the same order in every pass: a `ray.data.DataIterator`, or
            an `ExactPart` or `ItemsPart`, which have its methods.
        part: Which part they are.
        position: Where the first pass begins.
        rest: Gives the rows of that first pass; None for the whole part.
        owners: What must live as long as `rest` is read.
    """

    def __init__(
        self,
        rows: Any,
        part: Part,
        *,
        position: RowPosition | None = None,
        rest: Any = None,
        owners: object = None,
    ) -> None:
        self.part = part
        self.tell: Callable[[PassEnded], None] | None = None
        self._source = rows
        self._rest = rest
        self._owners = owners
        self._begin = position or RowPosition()
        self._shuffle: Shuffle | None = None
        self._rows = 0
        self._pass = 0
        self._is_rest = False

    @property
    def world_size(self) -> int:
        """Number of workers that the dataset is split between; 1 if each has the whole."""
        return self.part.of

    def __len__(self) -> int:
        """Give the number of rows of a whole pass, also where the first one gives only a rest."""
        return _known(self.part.rows)

    def __bool__(self) -> bool:
        return True

    def is_restarted_from(self, position: RowPosition) -> bool:
        """Return whether rows read before `position` are read again, in a restarted epoch."""
        return len(self._begin.discarded) > len(position.discarded)

    @property
    def streams(self) -> list[Any]:
        """The actors of Ray Data that hand out its rows, if it is split."""
        actors = [getattr(each, "_coord_actor", None) for each in (self._source, self._rest)]
        return [each for each in actors if each is not None]

    def position(self) -> dict[str, object]:
        """Say where the rows end that the user has received."""
        return self._begin.after(self.part.of, self._rows, self._shuffle).encode()

    def iter_batches(self, **options: Any) -> Iterable[Any]:
        """As that of `ray.data.DataIterator`."""
        return self._passes("iter_batches", options)

    def iter_torch_batches(self, **options: Any) -> Iterable[Any]:
        """As that of `ray.data.DataIterator`."""
        return self._passes("iter_torch_batches", options)

    def iter_tf_batches(self, **options: Any) -> Iterable[Any]:
        """As that of `ray.data.DataIterator`."""
        return self._passes("iter_tf_batches", options)

    def iter_jax_batches(self, **options: Any) -> Iterable[Any]:
        """As that of `ray.data.DataIterator`."""
        return self._passes("iter_jax_batches", options)

    def iter_rows(self) -> Iterable[dict[str, Any]]:
        """As that of `ray.data.DataIterator`."""
        return self._passes("iter_rows", {})

    def arrow_tables(self) -> Iterable[pa.Table]:
        """Give the rows as Arrow tables of any size: the cheapest way to read each of them once."""
        if hasattr(self._source, "arrow_tables"):
            return self._passes("arrow_tables", {}, tables=True)
        options = {"batch_size": None, "batch_format": "pyarrow"}
        return self._passes("iter_batches", options, tables=True)

    def count(self) -> int:
        """Count the rows of the part; Ray Data computes them for that, if it has to."""
        if self.part.rows is not None:
            return self.part.rows
        rows: int = self._source.materialize().count()
        return rows

    @property
    def in_object_store(self) -> bool:
        """Whether the tables that `arrow_tables` gives lie in Ray's object store.

        They stay there, and can be read, as long as anything that is a view of them is used.
        """
        return getattr(self._source, "in_object_store", False)

    def _passes(
        self, method: str, options: dict[str, Any], *, tables: bool = False
    ) -> Iterable[Any]:
        reading = replace(_Reading.of(getattr(self._source, method), options), tables=tables)
        return _Passes(partial(self._read, method, reading), self._items(reading))

    def _items(self, reading: _Reading) -> int | None:
        """Say how many items a whole pass has, if that is known."""
        if not reading.in_batches or self.part.rows is None:
            return self.part.rows
        if reading.batch_size is None:
            return None
        whole, rest = divmod(self.part.rows, reading.batch_size)
        return whole + (rest > 0 and not reading.options.get("drop_last", False))

    def _read(self, method: str, reading: _Reading) -> Iterator[Any]:
        source, options = self._begin_pass(reading)
        this, items, ended, fails = self._pass, 0, False, False
        counts = self.part.ordered and reading.counts
        try:
            for batch in getattr(source, method)(**options):
                items += 1
                if this == self._pass and counts:
                    self._rows += reading.rows_of(batch)
                yield batch
            ended = True
        finally:
            if this == self._pass:
                # What is left of an epoch may be nothing.
                empty = reading.lacks if ended and not items and not self._is_rest else ""
                fails = empty == "row" and self.part.alike
                batches = items if reading.in_batches and not reading.tables else 0
                self._end_pass(batches, ended=ended, counts=counts, empty="" if fails else empty)
        if fails:
            raise ValueError(_no_rows(self.part))

    def _begin_pass(self, reading: _Reading) -> tuple[Any, dict[str, Any]]:
        """Give what this pass reads, and how."""
        source: Any = self._source if self._rest is None else self._rest
        is_rest = self._is_rest = self._rest is not None
        self._rest = None
        self._pass += 1
        self._rows, self._shuffle = 0, reading.shuffle
        options = dict(reading.options)
        if reading.shuffle is not None:
            options |= reading.shuffle.options(self._begin.epoch, self.part.number)
            if is_rest and self._begin.goes_on(self.part.of, reading.shuffle):
                # It lies in the order of this very shuffle already.
                del options["local_shuffle_seed"], options["local_shuffle_buffer_size"]
        return source, options

    def _end_pass(self, batches: int, *, ended: bool, counts: bool, empty: str) -> None:
        position = self._begin
        if self.tell is not None:
            self.tell(
                PassEnded(
                    dataset=self.part.dataset,
                    epoch=position.epoch,
                    before=encode_reads(position.read),
                    discarded=[encode_reads(each) for each in position.discarded],
                    part=self.part.number,
                    parts=self.part.of,
                    rows=self._rows if counts else None,
                    batches=batches,
                    shuffled=self._shuffle is not None,
                    ended=ended,
                    in_all=self.part.in_all,
                    equalize=self.part.equalize,
                    empty=empty,
                )
            )
        self._begin = self._begin.passed(cut_short=not ended and not self._is_rest)
        self._rows, self._shuffle = 0, None
        self._owners = None

    def __getattr__(self, name: str) -> Any:
        if name == "_source":  # not set yet: this object is being unpickled
            raise AttributeError(name)
        return getattr(self._source, name)

    def __repr__(self) -> str:
        return f"DatasetShard({self._source!r}, {self.position()})"


class _Passes:
    """Each iteration is a new pass, as with Ray Data's own. `len()` is that of a whole one."""

    def __init__(self, begin: Callable[[], Iterator[Any]], items: int | None) -> None:
        self._begin = begin
        self._items = items

    def __iter__(self) -> Iterator[Any]:
        return self._begin()

    def __len__(self) -> int:
        return _known(self._items)

    def __bool__(self) -> bool:
        return True


def _no_rows(part: Part) -> str:
    if part.of == 1:
        return f"datasets[{part.dataset!r}] has no rows"
    return (
        f"datasets[{part.dataset!r}] has fewer rows than there are workers, {part.of}: none gets "
        "one, since all get equally many; start fewer workers, or set DataConfig.equalize"
    )


def _known(length: int | None) -> int:
    if length is None:
        raise TypeError(
            "this shard's length is not known before it has been read; give the trainer a "
            "dataset that is materialized, by ray.data.Dataset.materialize()"
        )
    return length


@dataclass(frozen=True)
class _Reading:
    """How a pass reads: what a method of Ray Data's was asked for, or has by default.

    Attributes:
        counts: Whether it is known which rows an item stands for.
        shuffle: The local shuffle, if it can be had again.
        tables: Whether the items are tables of any size, which are nobody's batches.
    """

    options: dict[str, Any]
    in_batches: bool
    batch_size: int | None
    counts: bool
    shuffle: Shuffle | None
    tables: bool = False

    @staticmethod
    def of(method: Callable[..., Any], given: Mapping[str, Any]) -> _Reading:
        parameters = inspect.signature(method).parameters
        options = dict(given)
        if "batch_size" not in parameters:
            return _Reading(options, method.__name__ != "iter_rows", None, True, None)
        batch_size = options.get("batch_size", parameters["batch_size"].default)
        if not isinstance(batch_size, int):
            return _Reading(options, True, None, not options.get("collate_fn"), None)
        shuffle = None
        buffer, seed = options.get("local_shuffle_buffer_size"), options.get("local_shuffle_seed")
        if buffer:
            options["local_shuffle_buffer_size"] = buffer = max(buffer, 2 * batch_size)
            shuffle = None if seed is None else Shuffle(buffer, batch_size, seed)
        return _Reading(options, True, batch_size, not buffer or shuffle is not None, shuffle)

    @property
    def lacks(self) -> str:
        """What there is none of where a pass gives nothing: "row", or only "batch"."""
        return "batch" if self.options.get("drop_last") else "row"

    def rows_of(self, item: Any) -> int:
        """Count the rows of one item of the pass."""
        if not self.in_batches:
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
