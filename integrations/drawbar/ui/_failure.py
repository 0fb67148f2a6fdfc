"""The failure of a run, and how to resume it."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from drawbar.ui._catalog import IndexedRun

_HEADLINE = re.compile(
    r"(?:rank (?P<rank>\d{1,9}): )?(?P<headline>.*?)"
    r"(?: \((?P<file>[^()]*):(?P<line>\d{1,9})(?: in (?P<function>[^()]*))?\))?",
    re.DOTALL,
)


def find_failure(run: IndexedRun) -> dict[str, Any] | None:
    """Return the root cause of the last failure of a run; None if there is none."""
    ends = [event for event in run.events if event["event"] == "attempt_ended"]
    ended = ends[-1] if ends else None
    error = run.record.error
    if run.status == "interrupted":
        headline = "The process that controlled the run died, without an error message."
        return _make_failure(headline, cause="driver", is_final=True, time=None, attempt=None)
    if ended is None and not error:
        return None
    if run.status in ("finished", "stopped") and not error:
        return None
    headlines = (ended or {}).get("failure_headlines") or [get_headline(error)]
    is_final = run.status == "failed"
    return _make_failure(
        headlines[0] or (ended or {}).get("cause", ""),
        cause=(ended or {}).get("cause", "worker"),
        traceback=error if is_final else "",
        attempt=(ended or {}).get("attempt"),
        time=(ended or {}).get("time"),
        also=headlines[1:],
        is_final=is_final,
        repeats=_count_repeats(ends),
    )


def _count_repeats(ends: Sequence[Mapping[str, Any]]) -> int:
    """Return how many of the last attempts have ended with the same error, on any rank."""
    errors = [split_headline(next(iter(end["failure_headlines"]), ""))["headline"] for end in ends]
    if not errors or not errors[-1]:
        return 1
    return sum(1 for _ in itertools.takewhile(lambda error: error == errors[-1], errors[::-1]))


def split_headline(headline: str) -> dict[str, str | None]:
    """Split a headline into `rank`, `headline`, `file`, `line`, and `function`."""
    match = _HEADLINE.fullmatch(headline)
    return match.groupdict() if match else {"headline": headline}


def _make_failure(headline: str, *, traceback: str = "", **values: Any) -> dict[str, Any]:
    parts = split_headline(headline)
    line = parts.get("line")
    rank = parts.get("rank")
    return {
        "headline": parts["headline"],
        "rank": None if rank is None else int(rank),
        "node": None,
        "file": parts.get("file"),
        "line": None if line is None else int(line),
        "function": parts.get("function"),
        "code": _find_code(traceback, parts.get("file"), line),
        "traceback": traceback,
        "also": [],
        **values,
    }


def _find_code(traceback: str, file: str | None, line: str | None) -> str | None:
    """Return the source line of a location from a traceback; None if it is not in it."""
    lines = traceback.splitlines()
    for number in range(len(lines) - 2, -1, -1):
        if f'"{file}", line {line},' in lines[number]:
            code = lines[number + 1].strip()
            return None if code.startswith("File ") else code
    return None


def get_headline(error: str) -> str:
    """Return the first line of an error that has text."""
    return next((line.strip() for line in error.splitlines() if line.strip()), "")


def describe_resume(run: IndexedRun, checkpoint: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return the arguments that resume a run, or None if it is active or finished.

    Args:
        run: The run.
        checkpoint: Newest stored checkpoint; None if there is none.
    """
    if run.status not in ("failed", "interrupted", "stopped"):
        return None
    name, storage = run.record.name, run.record.storage_path
    must_fix = "Fix the error first. Then " if run.status == "failed" else ""
    if run.record.is_launched:
        advice = "run the command again with these options:"
        code = f"--name {shlex.quote(name)} --storage-path {shlex.quote(storage)}"
    else:
        advice = "call fit() again with these arguments of RunConfig:"
        code = f'name={name!r},\nstorage_path={storage!r},\nresume="auto"'
    if checkpoint is None:
        text = "The run has no checkpoint. It starts from scratch."
    else:
        text = f"It resumes from {checkpoint['name']} (report {checkpoint['index']})."
    return {
        "advice": must_fix + advice if must_fix else advice[0].upper() + advice[1:],
        "code": code,
        "checkpoint": checkpoint and checkpoint["name"],
        "report_index": checkpoint and checkpoint["index"],
        "text": text,
    }
