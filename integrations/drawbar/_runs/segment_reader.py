"""Read the blocks of a segment that a run is writing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import BinaryIO

from drawbar._records.report_blocks import (
    decode_summary,
)
from drawbar._storage.files import is_current_file, open_regular_file
from drawbar._storage.journal_file import strip_torn_line
from drawbar._storage.manifest import DECODE_ERRORS
from drawbar._storage.report_files import (
    Segment,
    decompress_lines,
    decompress_summary,
    parse_segments,
)
from drawbar._storage.run_directory import RunDirectory

_CHUNK_BYTES = 2**20


class SegmentReader:
    """Lines of the segments of one attempt, in the order of the segments.

    An open segment stays open here. So its lines can be read from the last position, also after the
    controller has replaced it by a closed segment, whose lines are in another order.

    Args:
        directory: Directory of the run.
        attempt: Number of the attempt.
        first_index: Closed segments that only have reports with lower numbers are skipped.
        is_local: Whether this machine has all segments.
    """

    def __init__(
        self, directory: RunDirectory, attempt: int, first_index: int, is_local: bool
    ) -> None:
        self._directory = directory
        self._attempt = attempt
        self._first_index = first_index
        self._is_local = is_local
        self._last_first = -1  # `Segment.first` of the newest segment that was opened
        self._open: tuple[Segment, BinaryIO] | None = None

    def close(self) -> None:
        """Close the open segment."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def read_segments(self) -> Iterator[list[bytes]]:
        """Yield the complete lines of each segment that are new since the last call."""
        while True:
            if self._open is not None:
                segment, file = self._open
                # Checked first: a segment that was replaced has no lines after the ones read next.
                path = self._directory.local_path / segment.path
                is_current = is_current_file(path, file.fileno())
                yield list(_read_new_lines(file))
                if is_current:
                    return
                self.close()
            segments = [s for s in self._list_segments() if s.first > self._last_first]
            if not segments:
                return
            yield self._start_segment(segments[0])

    def _list_segments(self) -> list[Segment]:
        files = self._directory.run_files
        names = files.list_local_reports() if self._is_local else []
        segments = parse_segments(names or files.list_reports())
        return [segment for segment in segments if segment.attempt == self._attempt]

    def _start_segment(self, segment: Segment) -> list[bytes]:
        """Open an open segment on this machine, or return the lines of another segment."""
        if segment.end is None:
            with contextlib.suppress(FileNotFoundError):  # closed in the meantime, or remote
                path = self._directory.local_path / segment.path
                self._open = segment, open_regular_file(path)
                self._last_first = segment.first
                return []
        data = self._directory.run_files.read_report(segment.file_name)
        if data is None:
            return []  # closed in the meantime; the next list has the closed segment
        self._last_first = segment.first
        if segment.end is None and not data.startswith(b"\x1f\x8b"):
            return strip_torn_line(data).splitlines()
        if self._has_needed_reports(data):
            with contextlib.suppress(ValueError):  # a damaged segment
                return decompress_lines(data).splitlines()
        return []

    def _has_needed_reports(self, data: bytes) -> bool:
        if self._first_index <= 0:
            return True
        try:
            summary = decode_summary(decompress_summary(data))
        except (*DECODE_ERRORS, ValueError):
            return True
        ends = [end for ranges in summary.ranges.values() for _, end in ranges]
        return max(ends, default=math.inf) > self._first_index


def _read_new_lines(file: BinaryIO) -> Iterator[bytes]:
    """Yield complete lines from the current position. A torn line is read again later."""
    rest = b""
    while chunk := file.read(_CHUNK_BYTES):
        rest += chunk
        lines = strip_torn_line(rest)
        rest = rest[len(lines) :]
        yield from lines.splitlines()
    if rest:
        file.seek(-len(rest), 1)
