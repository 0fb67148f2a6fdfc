"""drawbar runs: list training runs."""

from __future__ import annotations

from typing import Any

from rich.filesize import decimal

from drawbar.cli._arguments import AsJson, Storage, command_errors
from drawbar.cli._output import format_age, format_metrics, plausible_time, write_json, write_table
from drawbar.train.runs import RunRecord, get_default_storage_path, list_runs


def runs(
    storage: Storage = None,
    as_json: AsJson = False,
) -> None:
    """List training runs, newest first."""
    with command_errors():
        records = sorted(list_runs(storage), key=_start_time, reverse=True)
        rows = [_to_dict(record) for record in records]
    if as_json:
        write_json(rows)
    elif rows:
        head = ("NAME", "STATUS", "STARTED", "ATTEMPTS", "WORKERS", "SIZE", "LATEST METRICS")
        write_table([head, *map(_format_row, rows)])
    else:
        print(f"No runs in {storage or get_default_storage_path()}.")


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
        "goodput": run.goodput.goodput,
        "progress": run.progress.to_dict() if run.progress is not None else None,
        "damage": run.damage,
    }


def _format_row(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["name"],
        row["status"] + (" (journal damaged)" if row["damage"] else ""),
        format_age(row["started"]),
        str(row["attempts"]),
        str(row["world_size"]),
        decimal(row["size"]),
        format_metrics(row["metrics"]),
    )
