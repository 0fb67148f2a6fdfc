"""Data of the page of a run."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from msgspec.structs import asdict

from drawbar.train import Manifest
from drawbar.ui._attempts import (
    AttemptSpan,
    describe_attempts,
    get_resume_name,
    make_time_axis,
    split_attempts,
)
from drawbar.ui._catalog import IndexedRun
from drawbar.ui._curves import list_numeric_metrics
from drawbar.ui._failure import describe_resume, find_failure, split_headline
from drawbar.ui._logs import list_log_ranks
from drawbar.ui._plain import flatten_settings
from drawbar.ui._summary import get_goodput, list_stalled, summarize_run

_MAX_FILES = 200
_MAX_CHECKPOINTS = 2_000
_MAX_METRICS = 2_000
_MAX_EVENTS = 1_000
_MAX_WORKERS = 4_096
_MAX_LOCATIONS = 32

Event = dict[str, Any]


def describe_run(run: IndexedRun) -> dict[str, Any]:
    """Return the data of the page of a run, without curves and logs."""
    spans = split_attempts(run, time.time())
    fixed = run.compute_once("page", lambda: _describe(run, spans))
    return {
        "run": summarize_run(run),
        **fixed,
        "attempts": describe_attempts(run, spans),
        "segments": make_time_axis(spans),
        "goodput": get_goodput(run),
    }


def _describe(run: IndexedRun, spans: Sequence[AttemptSpan]) -> dict[str, Any]:
    record = run.record
    starts = [event for event in run.events if event["event"] == "run_started"]
    checkpoints = _list_checkpoints(run, spans)
    stored = [checkpoint for checkpoint in checkpoints if checkpoint["status"] == "stored"]
    last_start = starts[-1] if starts else {}
    versions = {"drawbar": record.drawbar_version} if record.drawbar_version else {}
    stalled = list_stalled(run) if run.is_active else []
    return {
        "drawbar_version": record.drawbar_version,
        "run_id": last_start.get("run_id", ""),
        "failure": find_failure(run),
        "stalled": stalled,
        "resume": describe_resume(run, stored[-1] if stored else None),
        "checkpoints": checkpoints[-_MAX_CHECKPOINTS:],
        "num_checkpoints": len(checkpoints),
        "events": _list_marks(run.events),
        "metrics": _list_metrics(run),
        "report_locations": _list_report_locations(run.events),
        "workers": _list_workers(run, spans, {item["rank"] for item in stalled}),
        "log_ranks": list_log_ranks(record),
        "settings": {
            name: value if isinstance(value, str) else repr(value)
            for name, value in flatten_settings(record.config).items()
        },
        "environment": last_start.get("environment") or None,
        "versions": {**versions, **last_start.get("versions", {})},
        "notes": [],
    }


def _list_checkpoints(run: IndexedRun, spans: Sequence[AttemptSpan]) -> list[dict[str, Any]]:
    """Return stored, deleted, and unreadable checkpoints, oldest first."""
    manifests, unreadable = run.record.inspect_checkpoints()
    commits = {event["name"]: event for event in run.events if event["event"] == "checkpoint"}
    resumed = {get_resume_name(span.events) for span in spans}
    found = {manifest.name: _describe_manifest(manifest) for manifest in manifests}
    for name, event in commits.items():
        found.setdefault(name, _describe_commit(event))
    for name, reason in unreadable.items():
        found.setdefault(name, _describe_commit({"name": name}))
        found[name] |= {"status": "unreadable", "reason": reason}
    for event in run.events:
        if event["event"] == "checkpoint_deleted" and event["name"] in found:
            item = found[event["name"]]
            if item["status"] != "stored":
                item |= {"status": "deleted", "reason": ""}
    for name, item in found.items():
        item["commit_seconds"] = commits.get(name, {}).get("seconds")
        item["is_resume"] = name in resumed
    return sorted(found.values(), key=lambda item: (item["index"] or 0, item["time"] or 0.0))


def _describe_manifest(manifest: Manifest) -> dict[str, Any]:
    validation = manifest.validation
    return {
        **_describe_commit(asdict(manifest)),
        "bytes": manifest.nbytes,
        "num_files": len(manifest.files),
        "files": [{"path": file.path, "size": file.size} for file in manifest.files[:_MAX_FILES]],
        "validation": None
        if validation is None
        else {
            "status": validation.status.value,
            "metrics": flatten_settings(validation.metrics),
            "error": validation.error,
        },
        "status": "stored",
    }


def _describe_commit(event: Mapping[str, Any]) -> dict[str, Any]:
    """Describe a checkpoint of which only the event of its commit, or a part of it, is known."""
    return {
        "name": event["name"],
        "index": event.get("index"),
        "attempt": event.get("attempt"),
        "time": event.get("time"),
        "bytes": event.get("nbytes"),
        "num_files": None,
        "files": [],
        "metrics": flatten_settings(event.get("metrics", {})),
        "validation": None,
        "status": "deleted",
        "reason": "",
    }


def _list_marks(events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return warnings, failures, and other marks of the time axis."""
    marks: list[dict[str, Any]] = []
    found: list[tuple[str, int | None, str]]
    for event in events:
        match event["event"]:
            case "ranks_quiet":
                found = [("stall", int(r), text) for r, text in event["descriptions"].items()]
            case "reports_lost":
                text = f"Reports {event['first']} to {event['until'] - 1} are missing."
                found = [("reports_lost", None, text)]
            case "attempt_ended":
                cause = event["cause"]
                kind = cause if cause in ("preemption", "rollback") else "failure"
                text = next(iter(event["failure_headlines"]), event["cause"])
                rank = split_headline(text).get("rank")
                found = [(kind, None if rank is None else int(rank), text)]
            case "preemption_announced":
                found = [("preemption", None, _describe_preemption(event["info"]))]
            case "stop_requested":
                text = "after the next checkpoint" if event["save"] else "at once"
                found = [("stop", None, f"The user requested to end the run {text}.")]
            case "straggler":
                text = f"Rank {event['rank']} is slow in its {event['part']}."
                found = [("straggler", event["rank"], text)]
            case "run_ended" if event["outcome"] == "stopped":
                found = [("stop", None, "The run was stopped.")]
            case _:
                continue
        marks += [
            {"kind": kind, "time": event["time"], "attempt": event.get("attempt"), "rank": rank}
            | {"text": text}
            for kind, rank, text in found
        ]
    return marks[-_MAX_EVENTS:]


def _describe_preemption(info: Mapping[str, Any]) -> str:
    ranks = sorted(rank for each in info["preempted_node_to_ranks"].values() for rank in each)
    whose = f"of ranks {', '.join(map(str, ranks))} " if ranks else ""
    text = f"The nodes {whose}are about to be removed"
    try:
        deadline = datetime.fromtimestamp((info["deadline_ms"] or math.nan) / 1000, UTC)
    except (OverflowError, OSError, ValueError):  # it is unknown, or the journal is damaged
        return f"{text}."
    return f"{text}, at {deadline:%H:%M:%S} UTC."


def _list_metrics(run: IndexedRun) -> list[dict[str, Any]]:
    last = flatten_settings(run.record.metrics or {}, _MAX_METRICS)
    numeric = list_numeric_metrics(run)
    names = list(dict.fromkeys([*last, *numeric]))[:_MAX_METRICS]
    return [{"name": name, "last": last.get(name), "is_numeric": name in numeric} for name in names]


def _list_report_locations(events: Sequence[Event]) -> list[str]:
    """Return the lines that have reported, each once."""
    found = [event["location"] for event in events if event["event"] == "report_location"]
    return list(dict.fromkeys(found))[:_MAX_LOCATIONS]


def _list_workers(
    run: IndexedRun, spans: Sequence[AttemptSpan], stalled: set[int]
) -> list[dict[str, Any]]:
    """Return the workers of the last attempt that started them."""
    span = next((span for span in reversed(spans) if span.get("workers_started")), None)
    started = None if span is None else span.get("workers_started")
    workers = started["workers"][:_MAX_WORKERS] if started else ()
    programs = (
        [event for event in span.events if event["event"] == "program_started"] if span else []
    )
    program_pids = {event["rank"]: event["pid"] for event in programs}
    return [
        {
            "rank": ranks["world_rank"],
            "local_rank": ranks["local_rank"],
            "node": info["hostname"] or info["node_ip"],
            "node_id": info["node_id"],
            "pid": program_pids.get(ranks["world_rank"], info["pid"]),
            "gpus": list(info["gpu_ids"]),
            "status": "ended"
            if not run.is_active
            else "stalled"
            if ranks["world_rank"] in stalled
            else "running",
        }
        for info, ranks in workers
    ]
