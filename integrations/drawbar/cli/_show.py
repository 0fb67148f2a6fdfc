"""`drawbar show`: what happened in a run, what came of it, and where its time went."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from textwrap import indent
from typing import Any

from rich.filesize import decimal

from drawbar.cli._arguments import AsJson, RunName, record_of, refusals_told
from drawbar.cli._output import (
    ago,
    flat,
    number,
    one_line,
    shown_metrics,
    span,
    visible,
    visible_lines,
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
    record = record_of(run)
    with refusals_told():
        checkpoints, unreadable = record.look_at_checkpoints()
    if as_json:
        write_json({**_told(record, checkpoints), "unreadable": unreadable})
    else:
        _write(record, checkpoints, unreadable)


def _told(record: RunRecord, checkpoints: Sequence[Manifest]) -> dict[str, Any]:
    return {
        "name": record.name,
        "path": record.path,
        "status": record.status,
        "started": record.started,
        "last_event": record.last_event,
        "error": record.error,
        "damage": record.damage,
        "metrics": record.metrics,
        "attempts": record.timeline.attempts,
        "seconds": seconds_spent(record),
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


def seconds_spent(record: RunRecord) -> dict[str, float]:
    """Say where the time of a run went, in seconds.

    An attempt that has not ended counts until the run was last heard of.
    """
    heard = record.last_event or 0.0
    attempts = [
        each if each.ended is not None else replace(each, ended=max(heard, each.started))
        for each in record.timeline.attempts
    ]
    startup = sum(each.startup_seconds or each.seconds or 0.0 for each in attempts)
    whole = sum(each.seconds or 0.0 for each in attempts)
    saving = sum(each.checkpoint_seconds for each in attempts)
    pauses = sum(
        max(0.0, after.started - before.ended)
        for before, after in pairwise(attempts)
        if before.ended is not None
    )
    return {
        "starting": startup,
        "training": whole - startup,
        "between attempts": pauses,
        "committing checkpoints, beside the training": saving,
    }


def _write(
    record: RunRecord, checkpoints: Sequence[Manifest], unreadable: Mapping[str, str]
) -> None:
    print(f"{visible(record.name)}  {record.status}\n{visible(record.path)}")
    if record.started is not None:
        print(f"started {ago(record.started)}, last heard of {ago(record.last_event)}")
    if record.damage:
        print(f"damaged: {visible(record.damage)}; this is what can be read")
    attempts = record.timeline.attempts
    if attempts:
        print("\nattempts")
        for each in attempts:
            print(f"  {visible(str(each))}")
        print("\nwhere the time went")
        spent = seconds_spent(record)
        write_table([(name, span(seconds)) for name, seconds in spent.items()], "  ")
    if record.error:
        print("\nerror\n" + indent(visible_lines(record.error), "  "))
    if checkpoints or unreadable:
        print("\ncheckpoints")
        write_table([_row(each) for each in checkpoints], "  ")
    for name, why in unreadable.items():
        print(f"  {visible(f'{name} cannot be read: {why}')}")
    _write_metrics(record)
    if record.config:
        print("\nconfiguration")
        write_table([(name, one_line(value)) for name, value in flat(record.config).items()], "  ")


def _row(checkpoint: Manifest) -> tuple[str, ...]:
    return (
        checkpoint.name,
        decimal(checkpoint.nbytes),
        ago(checkpoint.time),
        checkpoint.status.value.lower(),
        shown_metrics(checkpoint.metrics),
    )


def _write_metrics(record: RunRecord) -> None:
    curves = record.curves()
    lasts = flat(record.metrics or {})
    if lasts:
        print("\nmetrics")
        rows = [
            (name, number(value), sparkline(list(curves.get(name, {}).values())))
            for name, value in lasts.items()
        ]
        write_table(rows, "  ")
