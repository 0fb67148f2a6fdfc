"""Read event files with the rules of TensorBoard."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

Points = dict[str, list[tuple[int, float]]]


def read_records(path: Path) -> Iterator[bytes]:
    data = path.read_bytes()
    while len(data) >= 12:
        (length,) = struct.unpack("Q", data[:8])
        record, data = data[12 : 12 + length], data[16 + length :]
        if len(record) == length:
            yield record


def read_points(log_dir: Path) -> Points:
    """Read the scalars with the rules of TensorBoard: a session start deletes later steps."""
    from tensorboardX.proto.event_pb2 import Event

    points: Points = {}
    for path in sorted(log_dir.iterdir()):
        for record in read_records(path):
            event: Any = Event.FromString(record)
            if event.HasField("session_log"):
                for tag in points:
                    points[tag] = [point for point in points[tag] if point[0] < event.step]
            for value in event.summary.value:
                points.setdefault(value.tag, []).append((event.step, value.simple_value))
    return points
