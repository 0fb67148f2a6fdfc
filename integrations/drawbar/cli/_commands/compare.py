"""drawbar compare: settings and metrics of runs side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import typer

from drawbar.cli._arguments import AsJson, RunNames, open_record
from drawbar.cli._output import (
    CommandError,
    flatten,
    format_value,
    one_line,
    write_json,
    write_table,
)
from drawbar.train.runs import RunRecord

_WIDTH = 32


def compare(
    runs: RunNames,
    show_all: Annotated[
        bool, typer.Option("--all", help="Include settings that are equal.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Compare the settings and metrics of several runs.

    Shows the settings that differ and the latest metrics.
    """
    if len(runs) < 2:
        raise CommandError(f"compare needs at least two runs, found {len(runs)}: {runs[0]}")
    records = [open_record(run) for run in runs]
    settings = _align([flatten(record.config) for record in records])
    if not show_all:
        settings = {name: row for name, row in settings.items() if len(set(map(repr, row))) > 1}
    metrics = _align([flatten(record.metrics or {}) for record in records])
    if as_json:
        paths = [record.path for record in records]
        write_json({"runs": paths, "configuration": settings, "metrics": metrics})
    else:
        _write(records, settings, metrics)


def _align(all_values: Sequence[Mapping[str, object]]) -> dict[str, list[object]]:
    names = dict.fromkeys(name for values in all_values for name in values)
    return {name: [values.get(name) for values in all_values] for name in names}


def _write(
    records: list[RunRecord], settings: dict[str, list[object]], metrics: dict[str, list[object]]
) -> None:
    rows = [["", *(record.name for record in records)]]
    rows.append(["status", *(record.status for record in records)])
    rows += [[name, *map(_format_cell, row)] for name, row in settings.items()]
    rows += [[name, *map(_format_cell, row)] for name, row in metrics.items()]
    write_table(rows)


def _format_cell(value: object) -> str:
    text = "-" if value is None else one_line(format_value(value))
    return text if len(text) <= _WIDTH else f"{text[: _WIDTH - 3]}..."
