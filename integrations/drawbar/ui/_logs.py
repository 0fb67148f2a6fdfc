"""Parts of the output of a rank."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any

from drawbar.train.runs import RunRecord

MAX_BYTES = 1_048_576
"""Maximum number of bytes in a reply."""
_MAX_RANKS = 4_096


def list_log_ranks(record: RunRecord) -> list[int]:
    """Return the ranks with a log on this machine, or all ranks if there is none."""
    ranks = []
    try:
        with os.scandir(Path(record.path) / "logs") as entries:
            for entry in entries:
                number = entry.name.removeprefix("rank_").removesuffix(".log")
                if entry.name == f"rank_{number}.log" and number.isascii() and number.isdigit():
                    ranks.append(int(number))
    except OSError:
        pass
    if not ranks:
        attempts = record.timeline.attempts
        ranks = list(range(max((attempt.world_size for attempt in attempts), default=0)))
    return sorted(ranks)[:_MAX_RANKS]


def read_log_part(record: RunRecord, rank: int, offset: int | None, limit: int) -> dict[str, Any]:
    """Return a part of a log.

    Args:
        record: The run.
        rank: Rank of the worker.
        offset: First byte; None for the end of the log, from the start of a line.
        limit: Maximum number of bytes.
    """
    limit = max(1, min(limit, MAX_BYTES))
    position = -limit if offset is None else offset
    part = _read_local(Path(record.path) / "logs" / f"rank_{rank}.log", position, limit)
    if part is None:
        # A link in the directory of a local run could refer to any file of the user.
        data = None if os.path.isdir(record.path) else record.read_log(rank)
        if data is None:
            return {"offset": 0, "next": 0, "size": None, "text": ""}
        start = _clamp(position, len(data))
        part = start, len(data), data[start : start + limit]
    start, size, data = part
    if offset is None and start > 0 and b"\n" in data:
        skipped = data.index(b"\n") + 1
        start, data = start + skipped, data[skipped:]
    complete = _cut_partial_character(data) if start + len(data) < size else data
    return {
        "offset": start,
        "next": start + len(complete),
        "size": size,
        "text": complete.decode(errors="replace"),
    }


def _read_local(path: Path, offset: int, limit: int) -> tuple[int, int, bytes] | None:
    """Return start, size, and bytes of a regular file; None if there is none."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except (OSError, ValueError):
        return None
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return None
        start = _clamp(offset, status.st_size)
        file.seek(start)
        return start, status.st_size, file.read(limit)


def _clamp(offset: int, size: int) -> int:
    return max(0, size + offset) if offset < 0 else min(offset, size)


def _cut_partial_character(data: bytes) -> bytes:
    """Remove the start of a character at the end of a part, which the next part repeats."""
    for length in range(1, min(4, len(data) - 1) + 1):
        first = data[-length]
        if first >= 0xC0:
            needed = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
            return data[:-length] if needed > length else data
        if first < 0x80:
            break
    return data
