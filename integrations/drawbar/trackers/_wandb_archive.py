"""Read the `.wandb` files that W&B writes on the machine of the run."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from drawbar.trackers._cursor import Cursor

ATTEMPT = "drawbar/attempt"
REPORT = "drawbar/report"
SOURCE = "drawbar/source"

# The format of LevelDB's log files, after a header of W&B.
_FILE_HEADER_BYTES = 7
_BLOCK_BYTES = 32_768
_RECORD_HEADER = struct.Struct("<IHB")
_FULL, _FIRST, _LAST = 1, 2, 4


@dataclass(frozen=True)
class PointId:
    """Identity of a point in the files of a run.

    Attributes:
        attempt: Number of the attempt.
        source: Rank or reduction, as `make_source` returns it.
        index: Number of the report.
    """

    attempt: int
    source: str
    index: int


class WandbFile:
    """File that W&B may still extend.

    Args:
        path: Path of the `.wandb` file.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = _FILE_HEADER_BYTES
        self._parts = b""

    def read_points(self) -> list[tuple[PointId, int]]:
        """Return the points that are new since the last call, and their steps."""
        return [point for record in self.read_records() for point in _decode_point(record)]

    def read_records(self) -> Iterator[bytes]:
        """Yield the complete records that are new since the last call."""
        base = self._offset
        with self._path.open("rb") as file:
            file.seek(base)
            data = file.read()
        while True:
            rest = _BLOCK_BYTES - self._offset % _BLOCK_BYTES
            if rest < _RECORD_HEADER.size:
                self._offset += rest  # padding
            start = self._offset - base + _RECORD_HEADER.size
            if start > len(data):
                return
            checksum, size, kind = _RECORD_HEADER.unpack_from(data, self._offset - base)
            payload = data[start : start + size]
            if zlib.crc32(payload, zlib.crc32(bytes([kind]))) != checksum or len(payload) < size:
                return  # not written completely
            self._offset += _RECORD_HEADER.size + size
            self._parts = payload if kind in (_FULL, _FIRST) else self._parts + payload
            if kind in (_FULL, _LAST):
                yield self._parts


def _decode_point(record: bytes) -> Iterator[tuple[PointId, int]]:
    from wandb.proto import wandb_internal_pb2

    decoded: Any = wandb_internal_pb2.Record.FromString(record)
    if decoded.WhichOneof("record_type") != "history":
        return
    names = {REPORT, ATTEMPT, SOURCE, "_step"}
    values: dict[str, Any] = {}
    for item in decoded.history.item:
        name = item.key or "/".join(item.nested_key)
        if name in names:
            values[name] = json.loads(item.value_json)
    if len(values) == len(names):
        point = PointId(int(values[ATTEMPT]), str(values[SOURCE]), int(values[REPORT]))
        yield point, int(values["_step"])


def list_files(directory: Path, run_id: str) -> list[Path]:
    """Return the files of a W&B run, the newest first."""
    paths = directory.glob(f"wandb/*run-*-{run_id}/run-{run_id}.wandb")
    return sorted(paths, key=lambda path: path.parent.name.removeprefix("offline-"), reverse=True)


def find_later_points(
    paths: list[Path], cursor: Cursor, sources: dict[int, str]
) -> tuple[set[PointId], int]:
    """Find the points that W&B has, although the cursor is before them.

    Args:
        paths: Files of the run, the newest first.
        cursor: Stored position.
        sources: For each key in the cursor, its source.

    Returns:
        The points, and the first unused step.
    """
    next_index = {sources[key]: index for key, index in cursor.next_index.items()}
    later: set[PointId] = set()
    next_step = 0
    for path in paths:
        points = WandbFile(path).read_points()
        found = {
            point
            for point, _ in points
            if point.attempt > cursor.attempt
            or (point.attempt == cursor.attempt and point.index >= next_index.get(point.source, 0))
        }
        later |= found
        next_step = max(next_step, *(step + 1 for _, step in points), 0)
        if len(found) < len(points):
            break  # the cursor was stored after this file was started
    return later, next_step
