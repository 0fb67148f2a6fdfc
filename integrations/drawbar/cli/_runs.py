"""`drawbar runs`: the runs of a storage, the newest first."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.filesize import decimal

from drawbar.cli._arguments import AsJson, refusals_told
from drawbar.cli._output import ago, credible, shown_metrics, write_json, write_table
from drawbar.train.runs import RunRecord, list_runs


def runs(
    storage: Annotated[
        str, typer.Argument(metavar="STORAGE", help="A storage path, or its address.")
    ] = "~/drawbar_results",
    as_json: AsJson = False,
) -> None:
    """List the runs of a storage."""
    with refusals_told():
        found = sorted(list_runs(storage), key=_began, reverse=True)
        told = [_told(run) for run in found]
    if as_json:
        write_json(told)
    elif told:
        head = ("NAME", "STATUS", "STARTED", "ATTEMPTS", "WORKERS", "SIZE", "LAST METRICS")
        write_table([head, *map(_row, told)])
    else:
        print(f"no runs in {storage}")


def _began(run: RunRecord) -> float:
    return credible(run.started) or 0.0


def _told(run: RunRecord) -> dict[str, Any]:
    attempts = run.timeline.attempts
    return {
        "name": run.name,
        "path": run.path,
        "status": run.status,
        "started": run.started,
        "last_event": run.last_event,
        "attempts": len(attempts),
        "world_size": attempts[-1].world_size if attempts else 0,
        "size": run.size(),
        "metrics": run.metrics,
        "damage": run.damage,
    }


def _row(told: dict[str, Any]) -> tuple[str, ...]:
    return (
        told["name"],
        told["status"] + (" (damaged)" if told["damage"] else ""),
        ago(told["started"]),
        str(told["attempts"]),
        str(told["world_size"]),
        decimal(told["size"]),
        shown_metrics(told["metrics"]),
    )
