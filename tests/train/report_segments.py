"""Read and change the segments with reports of a run, which have one JSON object in each line."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

Line = dict[str, Any]


def list_reports(run: Path) -> list[str]:
    """Return the names of the segments."""
    return sorted(path.name for path in (run / "reports").glob("*"))


def read_reports(run: Path, attempt: int = 0) -> list[bytes]:
    """Return one line for each report of an attempt, sorted by report and rank."""
    reports: list[Line] = []
    for path in (run / "reports").glob(f"{attempt}-*"):
        if path.suffix == ".gz":  # closed, and the first line is a summary
            lines = gzip.decompress(path.read_bytes()).splitlines()[1:]
        else:
            lines = path.read_bytes().splitlines()
        for line in lines:
            reports += _split_block(json.loads(line))
    reports.sort(key=lambda report: (report["index"], report["rank"]))
    return list(map(_encode, reports))


def _split_block(block: Line) -> Iterator[Line]:
    """Yield the reports in a line, which has reports of one rank in columns."""
    index, times = block["index"], block["time"]
    indices = index if isinstance(index, list) else range(index, index + len(times))
    for row, time in enumerate(times):
        metrics = {name: [values[row]] for name, values in block["metrics"].items()}
        yield {"rank": block["rank"], "index": indices[row], "time": [time], "metrics": metrics}


def _encode(report: Line) -> bytes:
    return json.dumps(report, separators=(",", ":")).encode() + b"\n"


def write_reports(run: Path, lines: Sequence[bytes], attempt: int = 0) -> Path:
    """Replace the segments of an attempt with an open one, as a killed driver leaves it."""
    for path in (run / "reports").glob(f"{attempt}-*"):
        path.unlink()
    segment = run / "reports" / f"{attempt}-0.jsonl"
    segment.write_bytes(b"".join(lines))
    return segment


def edit_reports(run: Path, attempt: int, change: Callable[[list[Line]], list[Line]]) -> None:
    """Change the reports of an attempt, given as the JSON values of one line for each."""
    lines = change([json.loads(line) for line in read_reports(run, attempt)])
    write_reports(run, list(map(_encode, lines)), attempt)
