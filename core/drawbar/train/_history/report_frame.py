"""Make a pandas data frame of the reports of a run, without a Python object for each report."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from drawbar.train._history.report_blocks import ReportBlock
from drawbar.train._history.run_history import REPORT_COLUMNS, RunHistory, get_column_name
from drawbar.train._metrics import Metrics, flatten

if TYPE_CHECKING:
    import numpy
    import pandas

_CHUNK_ROWS = 65_536
_LARGE_BLOCK_ROWS = 1024
"""Number of rows from which on a block is not worth being joined with others."""


def make_frame(history: RunHistory) -> pandas.DataFrame:
    """Return one row for each report and rank, sorted by report and rank.

    Raises:
        ImportError: pandas is not installed.
    """
    import pandas

    columns = _ReportColumns()
    for attempt, block in history.iter_blocks():
        columns.add(attempt, block)
    if not columns.num_rows:
        return pandas.DataFrame(columns=list(REPORT_COLUMNS))
    # Without a copy, the columns are not in memory twice.
    return pandas.DataFrame(columns.build(history.validation_metrics), copy=False)


class _Column:
    """Values of a metric, as arrays for large parts of the rows."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._chunks: list[numpy.ndarray[Any, Any] | list[Any]] = []
        self._values: list[Any] = []
        self._types: set[type] = set()

    def add(self, start: int, values: list[Any], types: set[type]) -> None:
        """Add values from row `start` on. Rows without a value are NaN."""
        if start > self.num_rows:
            self._values += [math.nan] * (start - self.num_rows)
            self._types.add(float)
        self.num_rows = start + len(values)
        if len(values) >= _LARGE_BLOCK_ROWS:
            self._flush()
            self._chunks.append(_to_array(values, types))
            return
        self._values += values
        self._types |= types
        if len(self._values) >= _CHUNK_ROWS:
            self._flush()

    def _flush(self) -> None:
        if self._values:
            self._chunks.append(_to_array(self._values, self._types))
            self._values, self._types = [], set()

    def build(self, num_rows: int) -> numpy.ndarray[Any, Any] | list[Any]:
        """Return all values; an array if all of them are numbers, or all are booleans."""
        import numpy

        if self.num_rows < num_rows:
            self.add(num_rows, [], set())
        self._flush()
        chunks, self._chunks = self._chunks, []
        kinds = {chunk.dtype.kind if isinstance(chunk, numpy.ndarray) else "O" for chunk in chunks}
        if kinds in ({"f"}, {"i"}, {"b"}, {"f", "i"}):
            return numpy.concatenate(chunks)
        return [
            value
            for chunk in chunks
            for value in (chunk.tolist() if isinstance(chunk, numpy.ndarray) else chunk)
        ]


def _to_array(values: list[Any], types: set[type]) -> numpy.ndarray[Any, Any] | list[Any]:
    import numpy

    try:
        if types == {int}:
            return numpy.array(values, dtype=numpy.int64)
        if types <= {int, float}:
            return numpy.array(values, dtype=numpy.float64)
        if types == {bool}:
            return numpy.array(values, dtype=numpy.bool_)
    except OverflowError:  # an integer of more than 64 bits
        pass
    return values


class _ReportColumns:
    """Columns of a table of reports."""

    def __init__(self) -> None:
        self.num_rows = 0
        self._blocks: list[tuple[int, int, int]] = []  # rank, attempt, number of rows
        self._is_sorted = True
        self._last = (-1, -1)  # report number and rank of the last row
        self._indices: list[numpy.ndarray[Any, Any]] = []
        self._time = _Column()
        self._metrics: dict[str, _Column] = {}

    def add(self, attempt: int, block: ReportBlock) -> None:
        """Add the reports of a block."""
        import numpy

        start, count = self.num_rows, len(block)
        self.num_rows += count
        self._blocks.append((block.rank, attempt, count))
        is_range = isinstance(block.index, int) or count == 1
        self._is_sorted &= is_range and self._last < (block.indices[0], block.rank)
        self._last = (block.indices[-1], block.rank)
        self._indices.append(
            numpy.arange(block.index, block.index + count)
            if isinstance(block.index, int)
            else numpy.array(block.index)
        )
        self._time.add(start, block.time, {float})
        for name, values in block.metrics.items():
            types = set(map(type, values))
            if dict in types:
                self._add_nested(start, name, values)
            else:
                self._get(name).add(start, values, types)

    def _add_nested(self, start: int, name: str, values: Sequence[Any]) -> None:
        for row, value in enumerate(values, start=start):
            for nested_name, nested in flatten({name: value}).items():
                self._get(nested_name).add(row, [nested], {type(nested)})

    def _get(self, metric: str) -> _Column:
        return self._metrics.setdefault(get_column_name(metric), _Column())

    def build(self, validated: dict[int, Metrics]) -> dict[str, Any]:
        """Return the sorted columns, with the validation metrics."""
        import numpy

        ranks, attempts, counts = (
            numpy.array(values) for values in zip(*self._blocks, strict=True)
        )
        columns: dict[str, Any] = {
            "rank": numpy.repeat(ranks, counts),
            "index": numpy.concatenate(self._indices),
            "attempt": numpy.repeat(attempts, counts),
            "time": self._time.build(self.num_rows),
        }
        self._indices.clear()
        order = None
        if not self._is_sorted:
            order = numpy.lexsort((columns["rank"], columns["index"]))
        for name in [*columns, *self._metrics]:
            values = columns[name] if name in REPORT_COLUMNS else self._build_metric(name)
            columns[name] = values if order is None else _reorder(values, order)
        _add_validation_metrics(columns, validated)
        return columns

    def _build_metric(self, name: str) -> numpy.ndarray[Any, Any] | list[Any]:
        column = self._metrics[name]
        self._metrics[name] = _Column()  # so that its parts are freed
        return column.build(self.num_rows)


def _reorder(
    values: numpy.ndarray[Any, Any] | list[Any], order: numpy.ndarray[Any, Any]
) -> numpy.ndarray[Any, Any] | list[Any]:
    return [values[row] for row in order] if isinstance(values, list) else values[order]


def _add_validation_metrics(columns: dict[str, Any], validated: dict[int, Metrics]) -> None:
    """Add the metrics to the first row of each report, which is the one of the lowest rank."""
    import numpy

    index = columns["index"]
    for number, metrics in validated.items():
        row = int(numpy.searchsorted(index, number))
        if row == len(index) or index[row] != number:
            continue
        for metric, value in flatten(metrics).items():
            name = get_column_name(metric)
            values = columns.get(name)
            if values is None:
                values = numpy.full(len(index), math.nan)
            if isinstance(values, numpy.ndarray) and not (
                values.dtype.kind == "f" and type(value) is float
            ):
                values = values.tolist()
            values[row] = value
            columns[name] = values
