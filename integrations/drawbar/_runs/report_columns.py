"""Reports of a run in columns: as sequences of values, and as a pandas data frame.

No Python object is made for each report.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drawbar._base.metrics import Metrics, flatten
from drawbar._history.run_history import REPORT_COLUMNS, RunHistory, get_column_name
from drawbar._records.report_blocks import ReportBlock

if TYPE_CHECKING:
    import numpy
    import pandas


@dataclass(frozen=True)
class ReportColumns:
    """Consecutive reports of one rank that have the same metrics, in columns.

    Attributes:
        rank: Rank that made the reports.
        indices: Number of each report.
        times: Time of each report, in seconds since the epoch.
        metrics: Values of each metric, as they were reported.

    Example:
        Print the number of reports of rank 0:

            run = runs.find_run("experiment")
            print(sum(len(columns.times) for columns in run.iter_report_columns(rank=0)))
    """

    rank: int
    indices: Sequence[int]
    times: Sequence[float]
    metrics: Mapping[str, Sequence[Any]]


def select_columns(blocks: Iterable[ReportBlock]) -> Iterator[ReportColumns]:
    """Yield blocks of reports without the details of how they are stored."""
    for block in blocks:
        yield ReportColumns(block.rank, block.indices, block.time, block.metrics)


def make_frame(history: RunHistory) -> pandas.DataFrame:
    """Return one row for each report and rank, sorted by report and rank.

    Raises:
        ImportError: pandas is not installed.
    """
    import pandas

    columns = _ReportColumns(history.count_stored())
    for attempt, block in history.iter_blocks():
        columns.add(attempt, block)
    if not columns.num_rows:
        return pandas.DataFrame(columns=list(REPORT_COLUMNS))
    # Without a copy, the columns are not in memory twice.
    return pandas.DataFrame(columns.build(history.validation_metrics), copy=False)


class _Column:
    """Values of a column: an array of numbers or booleans, or a list of other values.

    Args:
        capacity: Expected number of rows. The array is allocated once, because joining parts would
            need twice the memory.
    """

    def __init__(self, capacity: int) -> None:
        self.num_rows = 0
        self._capacity = capacity
        self._array: numpy.ndarray[Any, Any] | None = None
        self._values: list[Any] | None = None

    def add(
        self, start: int, values: Sequence[Any] | numpy.ndarray[Any, Any], types: set[type]
    ) -> None:
        """Add values from row `start` on. Rows without a value are NaN."""
        import numpy

        if start > self.num_rows:
            types = types | {float}
        if self._values is None:
            self._set_type(types, start + len(values))
        if self._array is not None:
            try:
                # Twice as fast as the assignment of a list.
                self._array[start : start + len(values)] = (
                    values
                    if isinstance(values, numpy.ndarray)
                    else numpy.fromiter(values, self._array.dtype, len(values))
                )
                if start > self.num_rows:
                    self._array[self.num_rows : start] = math.nan
            except OverflowError:  # an integer of more than 64 bits
                self._convert_to_list()
        if self._values is not None:
            self._values += [math.nan] * (start - self.num_rows)
            # Two metrics may have the same column name. The values of the second one are kept.
            self._values[start : start + len(values)] = values
        self.num_rows = start + len(values)

    def fill(self, start: int, number: int, count: int) -> None:
        """Add an integer `count` times."""
        self._set_type({int}, start + count)
        assert self._array is not None
        # The array is 0. If it is not written, it needs no memory.
        if number:
            self._array[start : start + count] = number
        self.num_rows = start + count

    def _set_type(self, types: set[type], num_rows: int) -> None:
        """Convert the array, so that it can have values of these types, and enlarge it."""
        import numpy

        name = _get_type_name(types)
        if self._array is None and name is not None:
            self._array = numpy.zeros(self._capacity, dtype=name)
        elif self._array is not None and self._array.dtype.name != name:
            if {self._array.dtype.name, name} <= {"int64", "float64"}:
                self._array = self._array.astype(numpy.float64)
            else:
                name = None
        if name is None:
            self._convert_to_list()
        elif self._array is not None and len(self._array) < num_rows:  # the run is in progress
            full = self._array
            self._array = numpy.zeros(2 * num_rows, dtype=full.dtype)
            self._array[: len(full)] = full

    def _convert_to_list(self) -> None:
        self._values = [] if self._array is None else self._array[: self.num_rows].tolist()
        self._array = None

    def build(self, num_rows: int) -> numpy.ndarray[Any, Any] | list[Any]:
        """Return all values."""
        if self.num_rows < num_rows:
            self.add(num_rows, [], set())
        if self._values is not None:
            return self._values
        assert self._array is not None
        return self._array[:num_rows]


def _get_type_name(types: set[type]) -> str | None:
    if types == {int}:
        return "int64"
    if types <= {int, float}:
        return "float64"
    return "bool" if types == {bool} else None


class _ReportColumns:
    """Columns of a table of reports.

    Args:
        capacity: Expected number of rows.
    """

    def __init__(self, capacity: int) -> None:
        self.num_rows = 0
        self._capacity = capacity
        self._columns = {name: _Column(capacity) for name in REPORT_COLUMNS}
        self._is_sorted = True
        self._last = (-1, -1)  # report number and rank of the last row

    def add(self, attempt: int, block: ReportBlock) -> None:
        """Add the reports of a block."""
        start, count = self.num_rows, len(block)
        self.num_rows += count
        is_range = isinstance(block.index, int) or count == 1
        self._is_sorted &= is_range and self._last < (block.indices[0], block.rank)
        self._last = (block.indices[-1], block.rank)
        for name, number in (("rank", block.rank), ("attempt", attempt)):
            self._columns[name].fill(start, number, count)
        self._columns["index"].add(start, _to_array(block.indices), {int})
        self._columns["time"].add(start, block.time, {float})
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
        return self._columns.setdefault(get_column_name(metric), _Column(self._capacity))

    def build(self, validated: dict[int, Metrics]) -> dict[str, Any]:
        """Return the sorted columns, with the validation metrics."""
        import numpy

        columns = {name: column.build(self.num_rows) for name, column in self._columns.items()}
        self._columns.clear()
        if not self._is_sorted:
            order = numpy.lexsort((columns["rank"], columns["index"]))
            for name, values in columns.items():
                columns[name] = _reorder(values, order)
        _add_validation_metrics(columns, validated)
        return columns


def _to_array(indices: Sequence[int]) -> numpy.ndarray[Any, Any]:
    import numpy

    # The conversion of a range would make a Python object for each number.
    if isinstance(indices, range):
        return numpy.arange(indices.start, indices.stop)
    return numpy.asarray(indices)


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
