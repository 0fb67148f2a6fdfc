"""Summaries of runs for the list of runs, and for `/metrics`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from drawbar.train import AttemptTimes, Goodput
from drawbar.ui._attempts import was_ended_by_user
from drawbar.ui._catalog import IndexedRun
from drawbar.ui._plain import flatten_settings

_MAX_METRICS = 200
_DAY_S = 86_400.0
_ENDED = ("finished", "failed", "stopped")


def summarize_run(run: IndexedRun) -> dict[str, Any]:
    """Return the fields of a run in the list of runs."""
    fixed = run.compute_once("summary", lambda: _summarize(run))
    start, last = fixed["start_time"], fixed["last_time"]
    until = time.time() if run.is_active else last
    return {
        **fixed,
        "duration": None if start is None or until is None else max(0.0, until - start),
        "progress": _describe_progress(run),
    }


def _summarize(run: IndexedRun) -> dict[str, Any]:
    record = run.record
    attempts = record.timeline.attempts
    goodput = get_goodput(run) or {}
    last = plausible_time(record.last_event_time)
    return {
        "id": run.id,
        "name": record.name,
        "path": record.path,
        "storage": record.storage_path,
        "status": run.status,
        "is_active": run.is_active,
        "is_stalled": run.is_active and bool(list_stalled(run)),
        "start_time": plausible_time(record.start_time),
        "last_time": last,
        "end_time": last if run.status in _ENDED else None,
        "attempts": len(attempts),
        "restarts": count_restarts(attempts),
        "world_size": next((a.world_size for a in reversed(attempts) if a.world_size), 0),
        "num_reports": None,
        "goodput": goodput.get("goodput"),
        "effective": goodput.get("effective"),
        "metrics": flatten_settings(record.metrics or {}, _MAX_METRICS),
        "error": next((line for line in record.error.splitlines() if line.strip()), "").strip(),
        "damage": record.damage,
    }


def count_restarts(attempts: Sequence[AttemptTimes]) -> int:
    """Return the number of attempts that followed a failure, not a stop or an end."""
    return sum(not was_ended_by_user(attempt) for attempt in attempts[:-1])


def plausible_time(moment: float | None) -> float | None:
    """Return a time in seconds since the epoch; None if a damaged file has an impossible one."""
    return moment if moment is not None and 0 < moment <= time.time() + _DAY_S else None


def list_stalled(run: IndexedRun) -> list[dict[str, Any]]:
    """Return the stalled ranks of a run in progress."""
    for event in reversed(run.events):
        if event["event"] in ("attempt_ended", "attempt_started", "run_ended"):
            break
        if event["event"] == "ranks_quiet":
            return [{"rank": int(r), "text": text} for r, text in event["descriptions"].items()]
    return []


def _describe_progress(run: IndexedRun) -> dict[str, Any] | None:
    """Return the progress of a run, with the remaining seconds from now on; None if unknown."""
    progress = run.record.progress
    if progress is None:
        return None
    eta = progress.eta_seconds
    if eta is not None:
        elapsed = time.time() - progress.time if run.is_active else 0.0
        eta = max(0.0, eta - max(0.0, elapsed))
    return {
        "done": progress.done,
        "total": progress.total,
        "unit": progress.unit,
        "fraction": None if progress.percent is None else progress.percent / 100,
        "eta_seconds": eta if run.is_active else None,
    }


_PARTS = {
    "productive": "training whose results the run still has",
    "unreported": "time in the training function of a run that has reported nothing",
    "warmup": "excess of the first step of an attempt over its median step",
    "checkpoint_blocked": "saving checkpoints, and waiting for their commits",
    "data_wait": "waiting for the next batch",
    "stalled": "ranks that made no progress",
    "placement": "from the start of the first attempt until its processes run",
    "startup": "from there to the first line of the training function",
    "restart": "from the end of an attempt to the first line of the next one",
    "lost_work": "training that was repeated, or will be",
    "unsaved": "training after the last checkpoint of a run that ended early",
    "detection": "from a failure until Drawbar handled it",
    "teardown": "from the end of the training function to the end of the run",
    "other": "the rest",
    "crash_gap": "no process hosted the run after a crash or a failure",
    "paused": "from a stop by the user to the next start",
}
"""Parts of goodput in the order in which they are drawn, and their definitions."""


def get_goodput(run: IndexedRun) -> dict[str, Any] | None:
    """Return the goodput of a run with its parts in seconds; None if it is unknown."""
    goodput = run.record.goodput
    if not goodput.elapsed:
        return None
    return {**goodput.to_dict(), "parts": _list_parts(goodput)}


def _list_parts(goodput: Goodput) -> list[dict[str, Any]]:
    values: Mapping[str, float] = {**goodput.parts, "paused": goodput.paused}
    phases = {name: "a phase of the training function" for name in values if name not in _PARTS}
    first, *others = _PARTS.items()
    return [
        {
            "name": name,
            "label": name.removeprefix("phase:").replace("_", " ").capitalize(),
            "seconds": values[name],
            "share": goodput.shares.get(name),
            "help": text,
        }
        for name, text in [first, *phases.items(), *others]
        if values.get(name, 0.0) > 0.0
    ]
