"""`drawbar runs`: the runs of a storage, the newest first."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.filesize import decimal

from drawbar.cli._arguments import AsJson, command_errors
from drawbar.cli._output import format_age, format_metrics, plausible_time, write_json, write_table
from drawbar.train.runs import RunRecord, list_runs


def runs(
    storage: Annotated[
        str, typer.Argument(metavar="STORAGE", help="A storage path, or its address.")
    ] = "~/drawbar_results",
    as_json: AsJson = False,
) -> None:
    """List the runs of a storage."""
    with command_errors():
        found = sorted(list_runs(storage), key=_start_time, reverse=True)
        told = [_to_dict(run) for run in found]
    if as_json:
        write_json(told)
    elif told:
        head = ("NAME", "STATUS", "STARTED", "ATTEMPTS", "WORKERS", "SIZE", "LAST METRICS")
        write_table([head, *map(_row, told)])
    else:
        print(f"no runs in {storage}")


def _start_time(run: RunRecord) -> float:
    return plausible_time(run.start_time) or 0.0


def _to_dict(run: RunRecord) -> dict[str, Any]:
    attempts = run.timeline.attempts
    return {
        "name": run.name,
        "path": run.path,
        "status": run.status,
        "started": run.start_time,
        "last_event": run.last_event_time,
        "attempts": len(attempts),
        "world_size": attempts[-1].world_size if attempts else 0,
        "size": run.compute_size(),
        "metrics": run.metrics,
        "damage": run.damage,
    }


def _row(told: dict[str, Any]) -> tuple[str, ...]:
    return (
        told["name"],
        told["status"] + (" (damaged)" if told["damage"] else ""),
        format_age(told["started"]),
        str(told["attempts"]),
        str(told["world_size"]),
        decimal(told["size"]),
        format_metrics(told["metrics"]),
    )
