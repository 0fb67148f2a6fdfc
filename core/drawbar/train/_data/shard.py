"""One rank's part of a Ray Data dataset, which knows how far it has been read.

Ray Data's iterators have no state, and rows come to a rank by whole blocks, so what all ranks have
read is not the beginning of the dataset. But with `preserve_order`, Ray Data splits the same
dataset in the same way each time. So "each of 2 workers had read 500 rows" says which rows are
left: split it again, leave 500 rows of each part out. The list of such pairs, one for every world
size that an epoch has gone through, is the position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import DataIterator

    from drawbar.train._data.exact_split import ExactPart

Read = tuple[tuple[int, int], ...]
"""(number of workers, rows that each of them has read), in the order of what happened."""


@dataclass(frozen=True)
class RowPosition:
    """How far a dataset has been read: so many whole epochs, and this much of the next."""

    epoch: int = 0
    read: Read = ()

    @staticmethod
    def decode(recorded: Mapping[str, Any] | None) -> RowPosition:
        """Read what `encode` has made; the beginning for None."""
        if recorded is None:
            return RowPosition()
        return RowPosition(recorded["epoch"], tuple((w, r) for w, r in recorded["read"]))

    def encode(self) -> dict[str, Any]:
        """Give plain values."""
        return {"epoch": self.epoch, "read": [list(pair) for pair in self.read]}

    def after(self, world_size: int, rows: int) -> RowPosition:
        """Give the position after each of so many workers has read so many rows more."""
        if not rows:
            return self
        if self.read and self.read[-1][0] == world_size:
            *before, (_, already) = self.read
            return RowPosition(self.epoch, (*before, (world_size, already + rows)))
        return RowPosition(self.epoch, (*self.read, (world_size, rows)))


class DatasetShard:
    """A rank's `ray.data.DataIterator`; after a restart, its first pass gives what was left.

    The methods `iter_batches`, `iter_torch_batches`, `iter_tf_batches`, `iter_jax_batches` and
    `iter_rows` count what they have handed out. Every other attribute is the iterator's:
    `materialize()` gives the whole part.

    `arrow_tables()` gives a pass over the blocks; `in_object_store` says where they are.

    Args:
        part: Gives the rank's rows, in the same order in every pass.
        world_size: Number of workers that the dataset is split between, 1 if it is not.
        position: Where the first pass begins.
        rest: Gives the rows of that first pass; None for the whole part.
        rows: Number of rows of a whole pass; None if it is not known before one.
        ordered: Whether the order of the rows is always the same. Otherwise only epochs count.
        owners: What must live as long as `rest` is read.
    """

    def __init__(
        self,
        part: DataIterator | ExactPart,
        *,
        world_size: int,
        position: RowPosition | None = None,
        rest: DataIterator | None = None,
        rows: int | None = None,
        ordered: bool = True,
        owners: object = None,
    ) -> None:
        self._part = part
        self._rest = rest
        self._owners = owners
        self._world_size = world_size
        self._length = rows
        self._ordered = ordered
        self._begin = position or RowPosition()
        self._rows = 0
        self._pass = 0

    @property
    def world_size(self) -> int:
        """Number of workers that the dataset is split between; 1 if each has the whole."""
        return self._world_size

    def __len__(self) -> int:
        """Give the number of rows of a whole pass, also where the first one gives only a rest."""
        return _known(self._length)

    def __bool__(self) -> bool:
        return True

    @property
    def streams(self) -> list[Any]:
        """The actors of Ray Data that hand out its rows, if it is split."""
        actors = [getattr(each, "_coord_actor", None) for each in (self._part, self._rest)]
        return [each for each in actors if each is not None]

    def position(self) -> dict[str, Any]:
        """Say where the rows end that the user has received."""
        return self._begin.after(self._world_size, self._rows).encode()

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
        if hasattr(self._part, "arrow_tables"):
            return self._passes("arrow_tables", {})
        return self.iter_batches(batch_size=None, batch_format="pyarrow")

    @property
    def in_object_store(self) -> bool:
        """Whether the tables that `arrow_tables` gives lie in Ray's object store.

        They stay there, and can be read, as long as anything that is a view of them is used.
        """
        return getattr(self._part, "in_object_store", False)

    def _passes(self, method: str, options: dict[str, Any]) -> Iterable[Any]:
        rows_of = _row_counter(getattr(self._part, method), options) if self._ordered else None
        begin = partial(self._read, method, options, rows_of or (lambda _: 0))
        return _Passes(begin, self._items(method, options))

    def _items(self, method: str, options: dict[str, object]) -> int | None:
        """Say how many items a whole pass by this method has, if that is known."""
        parameters = inspect.signature(getattr(self._part, method)).parameters
        if "batch_size" not in parameters or self._length is None:
            return self._length
        batch_size = options.get("batch_size", parameters["batch_size"].default)
        if not isinstance(batch_size, int):
            return None
        whole, rest = divmod(self._length, batch_size)
        return whole + (rest > 0 and not options.get("drop_last", False))

    def _read(
        self, method: str, options: dict[str, Any], rows_of: Callable[[Any], int]
    ) -> Iterator[Any]:
        source = self._part if self._rest is None else self._rest
        self._rest = None
        self._pass += 1
        this = self._pass
        try:
            for batch in getattr(source, method)(**options):
                if this == self._pass:
                    self._rows += rows_of(batch)
                yield batch
        finally:
            if this == self._pass:
                self._begin, self._rows = RowPosition(self._begin.epoch + 1), 0
                self._owners = None

    def __getattr__(self, name: str) -> Any:
        if name == "_part":  # not set yet: this object is being unpickled
            raise AttributeError(name)
        return getattr(self._part, name)

    def __repr__(self) -> str:
        return f"DatasetShard({self._part!r}, {self.position()})"


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


def _known(length: int | None) -> int:
    if length is None:
        raise TypeError(
            "this shard's length is not known before it has been read; give the trainer a "
            "dataset that is materialized, by ray.data.Dataset.materialize()"
        )
    return length


def _row_counter(
    iterate: Callable[..., Any], options: Mapping[str, Any]
) -> Callable[[Any], int] | None:
    """Give what tells the rows of a batch; None where it cannot be told which rows were given."""
    parameters = inspect.signature(iterate).parameters
    if "batch_size" not in parameters:  # iter_rows
        return lambda row: 1
    if options.get("local_shuffle_buffer_size"):
        return None
    batch_size = options.get("batch_size", parameters["batch_size"].default)
    if isinstance(batch_size, int):
        return lambda batch: batch_size
    return None if options.get("collate_fn") else _count_rows


def _count_rows(batch: Sized) -> int:
    if isinstance(batch, Mapping):
        return len(next(iter(batch.values()), ()))
    return len(batch)
