"""`drawbar show`: what happened in a run, what came of it, and where its time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from textwrap import indent
from typing import Any

from rich.filesize import decimal

from drawbar.cli._arguments import AsJson, RunName, command_errors, open_record
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
from drawbar.cli._terminal_plot import sparkline
from drawbar.train import Manifest
from drawbar.train.runs import RunRecord


def show(run: RunName, as_json: AsJson = False) -> None:
    """Show what happened in a run.

    That is: attempts, failures, checkpoints, metrics, and where the time went.
    """
    record = open_record(run)
    with command_errors():
        checkpoints, unreadable = record.inspect_checkpoints()
    if as_json:
        write_json({**_to_dict(record, checkpoints), "unreadable": unreadable})
    else:
        _write(record, checkpoints, unreadable)


def _to_dict(record: RunRecord, checkpoints: Sequence[Manifest]) -> dict[str, Any]:
    return {
        "name": record.name,
        "path": record.path,
        "status": record.status,
        "started": record.start_time,
        "last_event": record.last_event_time,
        "error": record.error,
        "damage": record.damage,
        "metrics": record.metrics,
        "attempts": record.timeline.attempts,
        "seconds": time_breakdown(record),
        "checkpoints": [
            {
                "name": each.name,
                "index": each.index,
                "attempt": each.attempt,
                "time": each.time,
                "bytes": each.nbytes,
                "status": each.status.value,
                "metrics": each.metrics,
            }
            for each in checkpoints
        ],
        "config": record.config,
    }


def time_breakdown(record: RunRecord) -> dict[str, float]:
    """Say where the time of a run went, in seconds.

    An attempt that has not ended counts until the run was last heard of.
    """
    last_event = record.last_event_time or 0.0
    attempts = [
        each
        if each.end_time is not None
        else replace(each, end_time=max(last_event, each.start_time))
        for each in record.timeline.attempts
    ]
    startup = sum(each.startup_seconds or each.total_seconds or 0.0 for each in attempts)
    whole = sum(each.total_seconds or 0.0 for each in attempts)
    saving = sum(each.checkpoint_seconds for each in attempts)
    restart_seconds = sum(
        max(0.0, after.start_time - before.end_time)
        for before, after in pairwise(attempts)
        if before.end_time is not None
    )
    return {
        "starting": startup,
        "training": whole - startup,
        "between attempts": restart_seconds,
        "committing checkpoints, beside the training": saving,
    }


def _write(
    record: RunRecord, checkpoints: Sequence[Manifest], unreadable: Mapping[str, str]
) -> None:
    print(
        f"{escape_control_chars(record.name)}  {record.status}\n{escape_control_chars(record.path)}"
    )
    if record.start_time is not None:
        print(
            f"started {format_age(record.start_time)}, last heard of "
            f"{format_age(record.last_event_time)}"
        )
    if record.damage:
        print(f"damaged: {escape_control_chars(record.damage)}; this is what can be read")
    attempts = record.timeline.attempts
    if attempts:
        print("\nattempts")
        for each in attempts:
            print(f"  {escape_control_chars(str(each))}")
        print("\nwhere the time went")
        spent = time_breakdown(record)
        write_table([(name, format_duration(seconds)) for name, seconds in spent.items()], "  ")
    if record.error:
        print("\nerror\n" + indent(escape_lines(record.error), "  "))
    if checkpoints or unreadable:
        print("\ncheckpoints")
        write_table([_row(each) for each in checkpoints], "  ")
    for name, why in unreadable.items():
        print(f"  {escape_control_chars(f'{name} cannot be read: {why}')}")
    _write_metrics(record)
    if record.config:
        print("\nconfiguration")
        write_table(
            [(name, one_line(value)) for name, value in flatten(record.config).items()], "  "
        )


def _row(checkpoint: Manifest) -> tuple[str, ...]:
    return (
        checkpoint.name,
        decimal(checkpoint.nbytes),
        format_age(checkpoint.time),
        checkpoint.status.value.lower(),
        format_metrics(checkpoint.metrics),
    )


def _write_metrics(record: RunRecord) -> None:
    curves = record.get_curves()
    lasts = flatten(record.metrics or {})
    if lasts:
        print("\nmetrics")
        rows = [
            (name, format_value(value), sparkline(list(curves.get(name, {}).values())))
            for name, value in lasts.items()
        ]
        write_table(rows, "  ")
