"""Read and change the segments with reports of a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from drawbar.train._history.report_blocks import decode_block, encode
from drawbar.train._storage.report_files import decompress_lines, parse_segments

Line = dict[str, Any]


def list_reports(run: Path) -> list[str]:
    """Return the names of the segments."""
    return sorted(path.name for path in (run / "reports").glob("*"))


def read_reports(run: Path, attempt: int = 0) -> list[bytes]:
    """Return one line for each report of an attempt, sorted by report and rank."""
    reports = []
    for segment in parse_segments(list_reports(run)):
        if segment.attempt == attempt:
            data = (run / segment.path).read_bytes()
            lines = data if segment.end is None else decompress_lines(data)
            blocks = map(decode_block, lines.splitlines())
            reports += [block.select([row]) for block in blocks for row in range(len(block))]
    reports.sort(key=lambda block: (block.indices[0], block.rank))
    return [encode(report) + b"\n" for report in reports]


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
    encoded = [json.dumps(line, separators=(",", ":")).encode() + b"\n" for line in lines]
    write_reports(run, encoded, attempt)
