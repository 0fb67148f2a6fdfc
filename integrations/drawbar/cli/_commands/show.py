"""drawbar show: status, attempts, checkpoints, and metrics of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from textwrap import indent
from typing import Annotated, Any

import typer
from rich.filesize import decimal

from drawbar.cli._arguments import AsJson, RunName, command_errors, open_record
from drawbar.cli._option_names import name_options
from drawbar.cli._output import (
    escape_control_chars,
    escape_lines,
    flatten,
    format_age,
    format_duration,
    format_metrics,
    format_value,
    one_line,
    write_json,
    write_table,
)
from drawbar.cli._ranks import format_part, show_ranks
from drawbar.cli._terminal_plot import sparkline
from drawbar.train import Manifest
from drawbar.train.runs import RunRecord

_ENDED = ("finished", "failed", "stopped")
_MAX_METRIC_WIDTH = 40


ShowRanks = Annotated[bool, typer.Option("--ranks", help="Show where the time of each rank went.")]


def show(run: RunName, as_json: AsJson = False, ranks: ShowRanks = False) -> None:
    """Show the status, attempts, checkpoints, goodput, and metrics of a run."""
    record = open_record(run)
    with command_errors():
        checkpoints, unreadable = record.inspect_checkpoints()
    if ranks:
        show_ranks(record, as_json=as_json)
    elif as_json:
        write_json({**_to_dict(record, checkpoints), "unreadable": unreadable})
    else:
        _write(record, checkpoints, unreadable)


def _to_dict(record: RunRecord, checkpoints: Sequence[Manifest]) -> dict[str, Any]:
    return {
        "name": record.name,
        "path": record.path,
        "status": record.status,
        "drawbar_version": record.drawbar_version,
        "started": record.start_time,
        "last_event": record.last_event_time,
        "error": record.error,
        "progress": record.progress.to_dict() if record.progress is not None else None,
        "damage": record.damage,
        "metrics": record.metrics,
        "attempts": record.timeline.attempts,
        "goodput": record.goodput.to_dict(),
        "stragglers": record.stragglers,
        "recoveries": record.recoveries,
        "health_decisions": record.health_decisions,
        "checkpoints": [
            {
                "name": checkpoint.name,
                "index": checkpoint.index,
                "attempt": checkpoint.attempt,
                "time": checkpoint.time,
                "bytes": checkpoint.nbytes,
                "status": checkpoint.status.value,
                "metrics": checkpoint.metrics,
            }
            for checkpoint in checkpoints
        ],
        "config": record.config,
        "environment": record.environment,
        "versions": record.versions,
    }


def _write(
    record: RunRecord, checkpoints: Sequence[Manifest], unreadable: Mapping[str, str]
) -> None:
    print(
        f"{escape_control_chars(record.name)}  {record.status}\n{escape_control_chars(record.path)}"
    )
    if record.start_time is not None:
        end = record.status if record.status in _ENDED else "last update"
        print(
            f"Started {format_age(record.start_time)}, {end} {format_age(record.last_event_time)}"
        )
    if record.progress is not None:
        print(f"Progress: {record.progress}")
    if record.damage:
        print(
            f"Journal damaged: {escape_control_chars(record.damage)}. Showing what could be read."
        )
    attempts = record.timeline.attempts
    if attempts:
        print("\nAttempts")
        for attempt in attempts:
            print(f"  {escape_control_chars(str(attempt))}")
            if attempt.decision:
                print(indent(escape_lines(attempt.decision), "    "))
        _write_goodput(record)
        for recovery in record.recoveries:
            print(f"  attempt {recovery.attempt}: {escape_control_chars(recovery.describe())}")
        for decision in record.health_decisions:
            print(f"  {escape_control_chars(decision.describe())}")
        for straggler in record.stragglers:
            print(f"  {escape_control_chars(straggler.describe())} (drawbar show --ranks)")
    error, hint = record.error, record.resume_hint
    if record.is_launched:
        error, hint = name_options(error), name_options(hint)
    if error:
        print("\nError\n" + indent(escape_lines(error), "  "))
    if hint:
        print(f"\n{escape_control_chars(hint)}.")
    if checkpoints or unreadable:
        print("\nCheckpoints")
        write_table([_format_row(checkpoint) for checkpoint in checkpoints], "  ")
    for name, reason in unreadable.items():
        print(f"  {escape_control_chars(f'{name}  unreadable: {reason}')}")
    _write_metrics(record)
    _write_settings("Configuration", record.config)
    _write_settings("Environment", record.environment)
    _write_settings("Versions", record.versions)


def _write_settings(title: str, settings: Mapping[str, object]) -> None:
    if settings:
        print(f"\n{title}")
        rows = [(name, one_line(value)) for name, value in flatten(settings).items()]
        write_table(rows, "  ")


def _write_goodput(record: RunRecord) -> None:
    goodput = record.goodput
    if goodput.goodput is None:
        print("\nGoodput  unknown: the run has reported nothing")
    else:
        print(f"\nGoodput  {goodput.goodput:.1%} of {format_duration(goodput.hosted)}")
    parts = sorted(goodput.parts.items(), key=lambda item: -item[1])
    rows = [
        (
            format_part(part),
            format_duration(seconds),
            f"{goodput.shares[part]:.1%}" if part in goodput.shares else "",
        )
        for part, seconds in parts
    ]
    if goodput.paused:
        rows.append(("paused", format_duration(goodput.paused), ""))
    if requested := goodput.requested_worker_seconds:
        share = f"{goodput.worker_seconds / requested:.1%} of the requested"
        rows.append(("time of workers", format_duration(goodput.worker_seconds), share))
    write_table([tuple(map(escape_control_chars, row)) for row in rows], "  ")


def _format_row(checkpoint: Manifest) -> tuple[str, ...]:
    return (
        checkpoint.name,
        decimal(checkpoint.nbytes),
        format_age(checkpoint.time),
        checkpoint.status.value.lower(),
        format_metrics(checkpoint.metrics),
    )


def _shorten(text: str) -> str:
    return text if len(text) <= _MAX_METRIC_WIDTH else f"{text[: _MAX_METRIC_WIDTH - 3]}..."


def _write_metrics(record: RunRecord) -> None:
    curves = record.get_curves(is_sampled=True)
    latest = flatten(record.metrics or {})
    if latest:
        print("\nMetrics")
        rows = [
            (name, _shorten(format_value(value)), sparkline(list(curves.get(name, {}).values())))
            for name, value in latest.items()
        ]
        write_table(rows, "  ")
