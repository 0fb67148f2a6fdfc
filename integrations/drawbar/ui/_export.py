"""Write a single HTML file with the pages of runs, which opens without a server."""

from __future__ import annotations

import base64
import itertools
import json
import re
import time
from collections.abc import Sequence
from typing import Any

from drawbar.ui._assets import INDEX_FILE, STATIC_DIRECTORY
from drawbar.ui._catalog import IndexedRun, RunIndex
from drawbar.ui._compare import MAX_RUNS as MAX_COMPARED
from drawbar.ui._compare import compare_curves, compare_runs
from drawbar.ui._curves import CurveQuery, list_numeric_metrics, make_curves
from drawbar.ui._logs import read_log_part
from drawbar.ui._plain import encode_json_for_html
from drawbar.ui._ranks import describe_ranks
from drawbar.ui._resources import describe_resources
from drawbar.ui._run_page import describe_run
from drawbar.ui._summary import summarize_run

MAX_RUNS = 200
"""Maximum number of runs in a file."""
_POINTS = 500
_MAX_METRICS = 200
_PREFIX = "drawbar/"
"""Prefix of the names of modules in the import map."""
_LOG_BYTES = 200_000
_MAX_LOGS = 8

_STYLE = re.compile(r'<link[^>]*href="static/([^"]+\.css)"[^>]*>')
_SCRIPT = re.compile(r'<script[^>]*src="static/([^"]+\.js)"[^>]*>\s*</script>')
_IMPORT = re.compile(r"""(\bfrom\s*|\bimport\s*)(["'])(\.{1,2}/[^"']+)\2""")


def render_page(index: RunIndex, info: dict[str, Any]) -> str:
    """Return one HTML file with the data of all runs, without references to other files.

    Args:
        index: The runs.
        info: Reply of `api/info`.

    Raises:
        OSError: A storage cannot be read.
        ValueError: There are no runs, or more than `MAX_RUNS`.
    """
    runs = list(index.refresh().values())
    if not runs:
        reasons = "; ".join(index.errors) or "the storage has none"
        raise ValueError(f"There are no runs to export: {reasons}. Pass a storage path with runs.")
    if len(runs) > MAX_RUNS:
        raise ValueError(
            f"{len(runs)} runs are too many for one file. Pass at most {MAX_RUNS} run directories."
        )
    now = time.time()
    replies: dict[str, Any] = {
        "api/info": {**info, "export": True, "can_stop": False},
        "api/runs": {"runs": [summarize_run(run) for run in runs], "errors": index.errors},
    }
    for run in runs:
        replies |= _collect(run)
    if 2 <= len(runs) <= MAX_COMPARED:
        replies |= _collect_comparison(runs)
    times = {"as_of": now, "server_time": now, "version": ""}
    responses = {url: {**times, **reply} for url, reply in replies.items()}
    return inline_assets({"export": True, "as_of": now, "responses": responses})


def _collect(run: IndexedRun) -> dict[str, Any]:
    base = f"api/runs/{run.id}"
    page = describe_run(run)
    metrics = list_numeric_metrics(run)[:_MAX_METRICS]
    replies: dict[str, Any] = {
        base: page,
        f"{base}/ranks": describe_ranks(run),
        f"{base}/resources": describe_resources(run),
    }
    for ranks, x in itertools.product(("lowest", "band"), ("step", "time")):
        query = CurveQuery(metrics, points=_POINTS, ranks=ranks, x=x)
        replies[f"{base}/curves?ranks={ranks}&x={x}"] = make_curves(run, query)
    first = (page["failure"] or {}).get("rank")
    for rank in sorted(page["log_ranks"], key=lambda rank: (rank != first, rank))[:_MAX_LOGS]:
        part = read_log_part(run.record, rank, None, _LOG_BYTES)
        replies[f"{base}/log?rank={rank}"] = {"rank": rank, "is_active": False, **part}
    return replies


def _collect_comparison(runs: Sequence[IndexedRun]) -> dict[str, Any]:
    ids = "%2C".join(run.id for run in runs)
    replies: dict[str, Any] = {f"api/compare?run={ids}": compare_runs(runs)}
    for x in ("step", "time"):
        query = CurveQuery(points=_POINTS, x=x)
        replies[f"api/compare/curves?run={ids}&x={x}"] = compare_curves(runs, query)
    return replies


def inline_assets(data: object) -> str:
    """Return the start page with its styles, scripts, and data in it."""
    page = (STATIC_DIRECTORY / INDEX_FILE).read_text()
    content = (
        f'<script type="application/json" id="drawbar-data">{encode_json_for_html(data)}</script>'
    )
    page = _STYLE.sub(lambda match: f"<style>{_read_text(match[1])}</style>", page)

    def replace_script(match: re.Match[str]) -> str:
        modules: dict[str, str] = {}
        _add_module(match[1], modules)
        imports = encode_json_for_html({"imports": modules})
        return (
            f'{content}<script type="importmap">{imports}</script>'
            f'<script type="module">import {json.dumps(_PREFIX + match[1])};</script>'
        )

    return _SCRIPT.sub(replace_script, page, count=1)


def _add_module(name: str, modules: dict[str, str]) -> None:
    """Add a module and the modules that it imports to an import map, as data URLs."""
    if _PREFIX + name in modules:
        return
    modules[_PREFIX + name] = ""  # a module may import itself indirectly

    def replace_import(match: re.Match[str]) -> str:
        path = (STATIC_DIRECTORY / name).parent / match[3]
        imported = path.resolve().relative_to(STATIC_DIRECTORY.resolve()).as_posix()
        _add_module(imported, modules)
        return f'{match[1]}"{_PREFIX}{imported}"'

    source = _IMPORT.sub(replace_import, _read_text(name))
    encoded = base64.b64encode(source.encode()).decode()
    modules[_PREFIX + name] = f"data:text/javascript;base64,{encoded}"


def _read_text(name: str) -> str:
    return (STATIC_DIRECTORY / name).read_text()
