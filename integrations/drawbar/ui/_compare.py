"""Comparison of several runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from drawbar.ui._catalog import IndexedRun
from drawbar.ui._curves import CurveQuery, list_numeric_metrics, make_curves
from drawbar.ui._plain import flatten_settings
from drawbar.ui._summary import summarize_run

MAX_RUNS = 8
_MAX_METRICS = 2_000


def compare_runs(runs: Sequence[IndexedRun]) -> dict[str, Any]:
    """Return the settings and last metrics of several runs side by side, different ones first."""
    settings = [_format_settings(run) for run in runs]
    metrics = [flatten_settings(run.record.metrics or {}, _MAX_METRICS) for run in runs]
    rows = []
    for name in dict.fromkeys(name for values in settings for name in values):
        values = [each.get(name) for each in settings]
        rows.append({"name": name, "values": values, "differs": len(set(values)) > 1})
    return {
        "runs": [summarize_run(run) for run in runs],
        "settings": sorted(rows, key=lambda row: not row["differs"]),
        "metrics": [
            {"name": name, "values": [each.get(name) for each in metrics]}
            for name in dict.fromkeys(name for values in metrics for name in values)
        ],
    }


def _format_settings(run: IndexedRun) -> dict[str, str]:
    settings = flatten_settings(run.record.config)
    return {n: value if isinstance(value, str) else repr(value) for n, value in settings.items()}


def compare_curves(runs: Sequence[IndexedRun], query: CurveQuery) -> dict[str, Any]:
    """Return the curves of the lowest rank by metric and run. Times count from each run's start."""
    curves: dict[str, dict[str, Any]] = {}
    for run in runs:
        names = query.metrics or list_numeric_metrics(run)
        found = make_curves(run, CurveQuery(metrics=names, points=query.points, x=query.x))
        for name, curve in found["curves"].items():
            if curve["x"]:
                curves.setdefault(name, {})[run.id] = curve
    return {"x": query.x, "curves": curves}
