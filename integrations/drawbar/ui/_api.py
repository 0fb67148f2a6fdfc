"""The JSON API of the server: one function for each URL."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from drawbar.ui._catalog import ACTIVE_STATUSES, IndexedRun, RunIndex
from drawbar.ui._compare import MAX_RUNS, compare_curves, compare_runs
from drawbar.ui._curves import MAX_CURVES, MAX_POINTS, CurveQuery, make_curves
from drawbar.ui._logs import read_log_part
from drawbar.ui._ranks import describe_ranks
from drawbar.ui._resources import describe_resources
from drawbar.ui._run_page import describe_run
from drawbar.ui._summary import summarize_run

MAX_WAIT_S = 30.0
"""Maximum time in seconds for which a long poll waits."""
_POLL_PERIOD_S = 0.5
_DEFAULT_LOG_BYTES = 200_000

Query = Mapping[str, list[str]]


class RequestError(Exception):
    """A request that cannot be answered.

    Args:
        status: HTTP status.
        message: Text for the user.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class Api:
    """Replies to requests for data.

    Args:
        index: The runs.
        info: Reply of `api/info`.
        is_closing: Function that returns True when the server ends, so that long polls end too.
    """

    def __init__(
        self, index: RunIndex, info: Mapping[str, Any], is_closing: Callable[[], bool]
    ) -> None:
        self._index = index
        self._info = info
        self._is_closing = is_closing

    def get(self, parts: list[str], query: Query, *, can_stop: bool) -> dict[str, Any]:
        """Reply to a GET request.

        Args:
            parts: Path after `/api/`, split at slashes.
            query: Parameters.
            can_stop: Whether the client may stop runs.

        Raises:
            RequestError: The request is not valid, or the run does not exist.
            OSError: The storage cannot be read.
        """
        match parts:
            case ["info"]:
                return {**self._info, "can_stop": can_stop}
            case ["runs"]:
                return self._list_runs(query)
            case ["runs", run_id]:
                return self._describe_run(run_id, query)
            case ["runs", run_id, name]:
                run = self._get_run(run_id)
                reply = self._get_part(run, name, query)
                return {"as_of": run.as_of, "version": run.version, **reply}
            case ["compare"]:
                return compare_runs(self._get_compared(query))
            case ["compare", "curves"]:
                return compare_curves(self._get_compared(query), parse_curve_query(query))
            case _:
                raise RequestError(404, "This page does not exist.")

    def post(self, parts: list[str], body: Mapping[str, Any]) -> dict[str, Any]:
        """Stop a run.

        Raises:
            RequestError: The request is not valid, or the run cannot be reached.
        """
        match parts:
            case ["runs", run_id, "stop"]:
                return _stop(self._get_run(run_id), body)
            case _:
                raise RequestError(404, "This page does not exist.")

    # -- runs

    def _get_run(self, run_id: str) -> IndexedRun:
        run = self._index.refresh().get(run_id)
        if run is None:
            raise RequestError(404, "The run does not exist. It may have been deleted or renamed.")
        return run

    def _list_runs(self, query: Query) -> dict[str, Any]:
        version = self._wait(self._index.get_version, query)
        runs = self._index.refresh()
        reply = {"version": version, "as_of": self._index.time}
        if version == _get(query, "after"):
            return {**reply, "unchanged": True}
        summaries = [summarize_run(run) for run in runs.values()]
        return {**reply, "runs": summaries, "errors": self._index.errors}

    def _describe_run(self, run_id: str, query: Query) -> dict[str, Any]:
        version = self._wait(lambda: self._get_run(run_id).version, query)
        run = self._get_run(run_id)
        reply = {"version": run.version, "as_of": run.as_of}
        if version == _get(query, "after"):
            return {**reply, "unchanged": True}
        return {**reply, **describe_run(run)}

    def _wait(self, get_version: Callable[[], str], query: Query) -> str:
        """Wait until a version differs from the one of the client, and return it."""
        known = _get(query, "after")
        deadline = time.monotonic() + _get_number(query, "wait", 0.0, 0.0, MAX_WAIT_S)
        while (version := get_version()) == known:
            if self._is_closing() or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_PERIOD_S)
        return version

    def _get_compared(self, query: Query) -> list[IndexedRun]:
        ids = [run_id for text in query.get("run", []) for run_id in text.split(",") if run_id]
        if not 2 <= len(ids) <= MAX_RUNS:
            raise RequestError(400, f"{len(ids)} runs are selected. Select two to {MAX_RUNS} runs.")
        return [self._get_run(run_id) for run_id in ids]

    # -- parts of the page of a run

    def _get_part(self, run: IndexedRun, name: str, query: Query) -> dict[str, Any]:
        match name:
            case "curves":
                return make_curves(run, parse_curve_query(query))
            case "log":
                return self._read_log(run, query)
            case "ranks":
                return describe_ranks(run)
            case "resources":
                return describe_resources(run)
            case "stacks":
                return _read_stacks(run)
            case "verify":
                checkpoint = _get(query, "name", "") or ""
                if checkpoint not in {m.name for m in run.record.list_checkpoints()}:
                    raise RequestError(404, f"There is no checkpoint {checkpoint!r}.")
                return {"name": checkpoint, "damage": run.record.verify_checkpoint(checkpoint)}
            case _:
                raise RequestError(404, "This page does not exist.")

    def _read_log(self, run: IndexedRun, query: Query) -> dict[str, Any]:
        rank = int(_get_number(query, "rank", 0, 0, 1e6))
        start = int(_get_number(query, "offset", -1, -1e15, 1e15))
        limit = int(_get_number(query, "limit", _DEFAULT_LOG_BYTES, 1, 1e9))
        deadline = time.monotonic() + _get_number(query, "wait", 0.0, 0.0, MAX_WAIT_S)
        while True:
            part = read_log_part(run.record, rank, None if start < 0 else start, limit)
            is_over = self._is_closing() or time.monotonic() >= deadline
            if part["text"] or is_over or not run.is_active:
                return {"rank": rank, "is_active": run.is_active, **part}
            time.sleep(_POLL_PERIOD_S)
            run = self._get_run(run.id)


def parse_curve_query(query: Query) -> CurveQuery:
    """Return the requested curves.

    Raises:
        RequestError: A parameter is not valid.
    """
    metrics = query.get("metric", [])
    if len(metrics) > MAX_CURVES:
        raise RequestError(
            400, f"{len(metrics)} metrics are requested. Request at most {MAX_CURVES}."
        )
    return CurveQuery(
        metrics=metrics,
        points=int(_get_number(query, "points", MAX_POINTS, 2, MAX_POINTS)),
        ranks=_get_choice(query, "ranks", ("lowest", "band", "each")),
        x=_get_choice(query, "x", ("step", "time")),
        limits=(_get_limit(query, "from"), _get_limit(query, "to")),
        is_exact=_get(query, "exact") == "1",
    )


def _get(query: Query, name: str, default: str | None = None) -> str | None:
    return query.get(name, [default])[-1]


def _get_limit(query: Query, name: str) -> float | None:
    return _get_number(query, name, 0.0) if _get(query, name) else None


def _get_choice(query: Query, name: str, choices: tuple[str, ...]) -> str:
    value = _get(query, name, choices[0])
    if value not in choices:
        raise RequestError(400, f"{name}={value!r} is not one of {', '.join(choices)}.")
    return str(value)


def _get_number(
    query: Query, name: str, default: float, low: float = -1e300, high: float = 1e300
) -> float:
    text = _get(query, name)
    try:
        value = default if text is None else float(text)
    except ValueError:
        value = float("nan")
    if not low <= value <= high:
        raise RequestError(400, f"{name}={text!r} is not a number from {low:g} to {high:g}.")
    return value


# -- control of an active run


def _stop(run: IndexedRun, body: Mapping[str, Any]) -> dict[str, Any]:
    should_save = body.get("save", True)
    if not isinstance(should_save, bool):
        raise RequestError(400, f"save={should_save!r} must be true or false.")
    handle = _attach(run)
    try:
        handle.stop(save=should_save)
    except RuntimeError as error:
        raise RequestError(409, str(error)) from error
    return {"status": handle.status}


def _read_stacks(run: IndexedRun) -> dict[str, Any]:
    """Request the stacks of a run in progress, or return the stacks of the last hang."""
    summary = ""
    if run.status in ACTIVE_STATUSES:
        try:
            summary = _attach(run).diagnose()
        except RuntimeError as error:  # the run has ended
            raise RequestError(409, str(error)) from error
    stacks = {str(rank): text for rank, text in run.record.read_stacks().items()}
    return {"summary": summary, "stacks": stacks, "is_live": bool(summary)}


def _attach(run: IndexedRun) -> Any:
    from drawbar.train import attach  # imports the trainers

    if not run.is_active:
        raise RequestError(409, f"The run is not in progress: it is {run.record.status}.")
    try:
        return attach(run.record.path)
    except (LookupError, RuntimeError, ImportError, ValueError, OSError) as error:
        raise RequestError(409, str(error)) from error
