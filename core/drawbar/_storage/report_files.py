"""Names and compression of the segments, the files with the reports of a run.

    reports/3-0-112000.jsonl.gz   closed segment: the first 112,000 reports of attempt 3
    reports/3-112000.jsonl        open segment: the reports after them

The controller appends lines to the open segment. A closed segment is compressed and never changes.
Its first line, which can be read alone, is a summary. `_records/report_blocks.py` has the format of
the lines.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

REPORTS_DIRECTORY = "reports"

_NAME = re.compile(r"(\d{1,18})-(\d{1,18})(?:\.jsonl|-(\d{1,18})\.jsonl\.gz)", re.ASCII)
# Level 6 makes files 10% smaller, but takes five times as long.
_COMPRESSION_LEVEL = 1
_GZIP_WINDOW_BITS = 31


@dataclass(frozen=True)
class Segment:
    """A file with consecutive reports of one attempt, of all ranks, in the order of their arrival.

    Attributes:
        attempt: Number of the attempt.
        first: Number of reports of the attempt in earlier segments.
        end: Number of reports of the attempt including this segment; None for an open segment.
    """

    attempt: int
    first: int
    end: int | None = None

    @property
    def file_name(self) -> str:
        """Name of the file."""
        stem = f"{self.attempt}-{self.first}"
        return f"{stem}.jsonl" if self.end is None else f"{stem}-{self.end}.jsonl.gz"

    @property
    def path(self) -> str:
        """Path of the file, relative to the run directory."""
        return f"{REPORTS_DIRECTORY}/{self.file_name}"


def parse_segments(file_names: Iterable[str]) -> list[Segment]:
    """Return the segments with these file names, sorted by attempt and position.

    If a process was killed after it had compressed a segment, the open segment still exists. It is
    not returned.
    """
    segments: dict[tuple[int, int], Segment] = {}
    for match in filter(None, map(_NAME.fullmatch, file_names)):
        attempt, first, end = match.groups()
        segment = Segment(int(attempt), int(first), None if end is None else int(end))
        if end is not None or (segment.attempt, segment.first) not in segments:
            segments[segment.attempt, segment.first] = segment
    return [segments[key] for key in sorted(segments)]


def list_superseded(file_names: Iterable[str]) -> list[str]:
    """Return the names of open segments that also exist as closed segments."""
    names = list(filter(_NAME.fullmatch, file_names))
    return sorted(set(names) - {segment.file_name for segment in parse_segments(names)})


def compress(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Compress chunks to a gzip member, piece by piece.

    A closed segment has two of them, the summary and the lines, so that gzip can read it too.
    """
    compressor = zlib.compressobj(_COMPRESSION_LEVEL, zlib.DEFLATED, _GZIP_WINDOW_BITS)
    yield from filter(None, map(compressor.compress, chunks))
    yield compressor.flush()


def decompress_summary(data: bytes) -> bytes:
    """Return the summary of a closed segment.

    Args:
        data: Content of the segment. The rest after the summary may be missing.

    Raises:
        ValueError: The data is damaged, or ends within the summary.
    """
    return _decompress_member(data)[0]


def decompress_lines(data: bytes) -> bytes:
    """Return the lines of a closed segment, without the summary.

    Raises:
        ValueError: The data is damaged.
    """
    lines, rest = _decompress_member(_decompress_member(data)[1])
    if rest:
        raise ValueError("it has data after its end")
    return lines


def _decompress_member(data: bytes) -> tuple[bytes, bytes]:
    decompressor = zlib.decompressobj(_GZIP_WINDOW_BITS)
    try:
        content = decompressor.decompress(data)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if not decompressor.eof:
        raise ValueError("its end is missing")
    return content, decompressor.unused_data
