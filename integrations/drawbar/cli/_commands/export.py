"""drawbar export: all reports of a run as a table."""

from __future__ import annotations

import csv
import io
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from drawbar.cli._arguments import AsJson, RunName, open_record
from drawbar.cli._output import CommandError, encode_json, format_os_error
from drawbar.train.backend import make_import_error
from drawbar.train.runs import RunRecord

if TYPE_CHECKING:
    import pyarrow

Row = dict[str, Any]

_PART_ROWS = 65_536
_FIXED_COLUMNS = ("rank", "index", "attempt", "time")


def export(
    run: RunName,
    as_csv: Annotated[bool, typer.Option("--csv", help="Write CSV (default).")] = False,
    as_parquet: Annotated[bool, typer.Option("--parquet", help="Write Parquet.")] = False,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write to FILE instead of standard output.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Export all reports of a run as CSV, Parquet, or JSON.

    Writes one row per rank and report. Omits reports that a restart replaced.
    """
    if as_csv + as_parquet + as_json > 1:
        raise CommandError("Use only one of --csv, --parquet, and --json.")
    if as_parquet and output is None and sys.stdout.isatty():
        raise CommandError("Parquet cannot be written to a terminal. Use --output FILE.")
    record = open_record(run)
    write = _write_json if as_json else _write_parquet if as_parquet else _write_csv
    # A temporary file, so that an error leaves no partial output.
    with tempfile.TemporaryFile() as data:
        write(record, data)
        data.seek(0)
        if output is None:
            shutil.copyfileobj(data, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return
        try:
            with open(output, "wb") as file:
                shutil.copyfileobj(data, file)
        except OSError as error:
            raise CommandError(format_os_error(error)) from error


def _write_json(record: RunRecord, file: IO[bytes]) -> None:
    file.write(encode_json(record.list_report_rows()))


def _write_csv(record: RunRecord, file: IO[bytes]) -> None:
    columns = list(_list_columns(record.iter_report_rows()))
    text = io.TextIOWrapper(file, errors="backslashreplace", newline="", write_through=True)
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(record.iter_report_rows())
    text.detach()


def _list_columns(rows: Iterable[Row]) -> dict[str, None]:
    return dict.fromkeys((*_FIXED_COLUMNS, *(name for row in rows for name in row)))


def _write_parquet(record: RunRecord, file: IO[bytes]) -> None:
    """Write the reports in parts, so that they are not in memory all at once."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise CommandError(f"--parquet: {make_import_error('pyarrow', extra='data')}") from error
    try:
        # A first pass determines the columns and their types.
        schema = pyarrow.unify_schemas(
            [_make_table(rows).schema for rows in _iter_parts(record)],
            promote_options="permissive",
        )
        with parquet.ParquetWriter(file, schema) as writer:
            for rows in _iter_parts(record):
                writer.write_table(_make_table(rows, schema))
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, ValueError, OverflowError) as error:
        raise CommandError(f"Parquet needs one type per metric: {error}. Use --csv.") from error


def _iter_parts(record: RunRecord) -> Iterator[list[Row]]:
    rows = record.iter_report_rows()
    part = list(islice(rows, _PART_ROWS))
    yield part  # also if it is empty: a table without rows has columns
    while part := list(islice(rows, _PART_ROWS)):
        yield part


def _make_table(rows: list[Row], schema: pyarrow.Schema | None = None) -> pyarrow.Table:
    import pyarrow

    columns = list(_list_columns(rows)) if schema is None else schema.names
    values = {name: [row.get(name) for row in rows] for name in columns}
    return pyarrow.table(values, schema)
