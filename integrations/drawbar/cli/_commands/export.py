"""drawbar export: all reports of a run as a table."""

from __future__ import annotations

import csv
import io
import sys
from pathlib import Path
from typing import Annotated

import typer

from drawbar.cli._arguments import AsJson, RunName, open_record
from drawbar.cli._output import CommandError, encode_json, format_os_error

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
    rows = open_record(run).list_report_rows()
    encode = encode_json if as_json else _to_parquet if as_parquet else _to_csv
    data = encode(rows)
    if output is not None:
        try:
            output.write_bytes(data)
        except OSError as error:
            raise CommandError(format_os_error(error)) from error
        return
    if as_parquet and sys.stdout.isatty():
        raise CommandError("Parquet cannot be written to a terminal. Use --output FILE.")
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def _columns(rows: list[dict[str, object]]) -> list[str]:
    return list(dict.fromkeys((*_FIXED_COLUMNS, *(name for row in rows for name in row))))


def _to_csv(rows: list[dict[str, object]]) -> bytes:
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode(errors="backslashreplace")


def _to_parquet(rows: list[dict[str, object]]) -> bytes:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise CommandError(
            "--parquet needs pyarrow. Install it with: pip install 'drawbar[data]'"
        ) from error
    try:
        table = pyarrow.table({name: [row.get(name) for row in rows] for name in _columns(rows)})
    except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError, ValueError, OverflowError) as error:
        raise CommandError(f"Parquet needs one type per metric: {error}. Use --csv.") from error
    sink = io.BytesIO()
    parquet.write_table(table, sink)
    return sink.getvalue()
