"""Read the reports of a run from its segments, also while the controller appends to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial

from drawbar._process.errors import DamagedRunError
from drawbar._process.threads import DaemonThreadPool
from drawbar._records.report_blocks import (
    ReportBlock,
    SegmentSummary,
    decode_block,
    decode_summary,
    merge_blocks,
)
from drawbar._storage.journal_file import strip_torn_line
from drawbar._storage.manifest import DECODE_ERRORS
from drawbar._storage.report_files import (
    Segment,
    decompress_lines,
    decompress_summary,
    parse_segments,
)
from drawbar._storage.run_files import RunFiles

_SUMMARY_BYTES = 64 * 1024
"""Number of bytes of a closed segment that are read first for its summary."""


class StoredReports:
    """Reports of a run in progress or ended, as of the first access.

    Summaries and lists of segments are kept in memory, but no other reports.

    Args:
        run_files: Files of the run.
        strict: Whether damaged segments raise errors. Otherwise, they are recorded in `damage`,
            and the readable lines are used.
    """

    def __init__(self, run_files: RunFiles, *, strict: bool = True) -> None:
        self.damage: dict[str, str] = {}
        self._files = run_files
        self._strict = strict
        self._summaries: dict[Segment, SegmentSummary] = {}
        self._segments: dict[int, list[Segment]] | None = None

    def __reduce__(self) -> tuple[object, ...]:
        return partial(StoredReports, strict=self._strict), (self._files,)

    # -- segments

    def list_attempts(self) -> list[int]:
        """Return the attempts that have segments."""
        return list(self._list_all())

    def list_segments(self, attempt: int) -> list[Segment]:
        """Return the segments of an attempt in order."""
        return self._list_all().get(attempt, [])

    def _list_all(self) -> dict[int, list[Segment]]:
        if self._segments is None:
            self._segments = {}
            for segment in parse_segments(self._files.list_reports()):
                self._segments.setdefault(segment.attempt, []).append(segment)
        return self._segments

    def get_summary(self, segment: Segment) -> SegmentSummary:
        """Return the summary of a segment. For an open segment, this reads all its reports.

        Raises:
            DamagedRunError: The segment is damaged, in strict mode.
            OSError: The storage cannot be read.
        """
        if segment not in self._summaries:
            self._summaries[segment] = self._read_summary(segment)
        return self._summaries[segment]

    def get_last_time(self, attempt: int) -> float | None:
        """Return the time of the last report of an attempt; None if it has none."""
        last = self.get_last(attempt)
        return max(block.time[-1] for block in last.values()) if last else None

    def get_last(self, attempt: int) -> dict[int, ReportBlock]:
        """Return the last report of each rank in an attempt."""
        segments = self.list_segments(attempt)
        return self.get_summary(segments[-1]).last if segments else {}

    def is_contiguous(self, attempt: int) -> bool:
        """Return False if a segment before the last one is missing."""
        position = 0
        for segment in self.list_segments(attempt):
            if segment.first != position:
                return False
            position = self._get_end(segment)
        return True

    def count_reports(self, attempt: int) -> int:
        """Return the number of reports up to the end of the last segment of an attempt."""
        segments = self.list_segments(attempt)
        return self._get_end(segments[-1]) if segments else 0

    def _get_end(self, segment: Segment) -> int:
        if segment.end is not None:
            return segment.end
        return segment.first + self.get_summary(segment).num_reports

    # -- reports

    def read_blocks(
        self, segments: Iterable[Segment], rank: int | None = None
    ) -> Iterator[list[ReportBlock]]:
        """Yield the blocks of each segment, sorted by their first report and their rank.

        The next segment is read and decompressed while the caller uses the current one. A segment
        with reports of earlier segments is damaged, and has no blocks without strict mode.

        Args:
            segments: Segments to read, of one attempt and in order.
            rank: Rank whose reports are read. Default: all ranks.

        Raises:
            DamagedRunError: A segment is damaged, in strict mode.
            OSError: The storage cannot be read.
        """
        pool = DaemonThreadPool(1, "drawbar-read-reports")
        try:
            following = None
            ends: dict[int, int] = {}  # by rank: one after its last report
            for segment in [*segments, None]:
                current = following
                following = segment and (segment, pool.submit(self._read_lines, segment))
                if current is not None:
                    lines = current[1].result()
                    blocks = list(merge_blocks(self._decode_lines(current[0], lines, rank)))
                    if repeated := _find_repeated(blocks, ends):
                        self._on_damage(current[0], f"{self._describe(current[0])} {repeated}")
                        blocks = []
                    yield sorted(blocks, key=lambda block: (block.indices[0], block.rank))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def check_all(self) -> dict[str, str]:
        """Read all segments, and return the damage by path. Use this without strict mode."""
        for attempt in self.list_attempts():
            segments = self.list_segments(attempt)
            for segment, blocks in zip(segments, self.read_blocks(segments), strict=True):
                num_reports = sum(map(len, blocks))
                if segment.end is not None and segment.first + num_reports != segment.end:
                    self.damage.setdefault(
                        segment.path,
                        f"it has {num_reports} reports instead of {segment.end - segment.first}",
                    )
        return self.damage

    def _read_summary(self, segment: Segment) -> SegmentSummary:
        if segment.end is None:
            segments = self.list_segments(segment.attempt)
            position = segments.index(segment)
            last = self.get_summary(segments[position - 1]).last if position else {}
            summary = SegmentSummary(last=dict(last))
            for block in self._decode_lines(segment, self._read_lines(segment)):
                summary.add(block)
            return summary
        for size in (_SUMMARY_BYTES, None):
            data = self._read(segment, size)
            try:
                return decode_summary(decompress_summary(data))
            except (*DECODE_ERRORS, ValueError) as error:
                # The summary may be longer than the part that was read.
                if size is None or len(data) < size:
                    self._on_damage(segment, f"{self._describe(segment)} cannot be read: {error}")
                    break
        return SegmentSummary()

    def _read_lines(self, segment: Segment) -> bytes:
        data = self._read(segment)
        if segment.end is None and not data.startswith(b"\x1f\x8b"):
            return strip_torn_line(data)
        try:
            return decompress_lines(data)
        except ValueError as error:
            self._on_damage(segment, f"{self._describe(segment)} cannot be read: {error}")
            return b""

    def _decode_lines(
        self, segment: Segment, lines: bytes, rank: int | None = None
    ) -> Iterator[ReportBlock]:
        prefix = b"" if rank is None else b'{"rank":%d,' % rank
        for number, line in enumerate(lines.split(b"\n")[:-1], start=1):
            if not line.startswith(prefix):
                continue
            try:
                yield decode_block(line)
            except DECODE_ERRORS as error:
                self._on_damage(
                    segment, f"Line {number} of {self._describe(segment)} cannot be read: {error}"
                )

    def _read(self, segment: Segment, size: int | None = None) -> bytes:
        """Read a segment, which may have been compressed since the segments were listed."""
        data = self._files.read_report(segment.file_name, size)
        if data is None:
            for current in parse_segments(self._files.list_reports()):
                if (current.attempt, current.first) == (segment.attempt, segment.first):
                    data = self._files.read_report(current.file_name)
        if data is None:
            self._on_damage(segment, f"{self._describe(segment)} does not exist")
        return data or b""

    def _describe(self, segment: Segment) -> str:
        return f"{self._files.path / segment.path}"

    def _on_damage(self, segment: Segment, description: str) -> None:
        self.damage.setdefault(segment.path, description)
        if not self._strict:
            return
        if segment.end is None:
            remedy = (
                'fit() with resume="auto" moves it to the directory broken, keeps its readable '
                "lines, and resumes from the newest intact checkpoint."
            )
        else:
            remedy = (
                'Move the file out of the run directory; fit() with resume="auto" then records '
                "which reports are missing, and resumes from the newest intact checkpoint."
            )
        raise DamagedRunError(f"{description}. The checkpoints are not affected. {remedy}")


def _find_repeated(blocks: Iterable[ReportBlock], ends: dict[int, int]) -> str:
    """Describe a report of an earlier segment, or return "". Update the ends of the ranks."""
    later_ends = dict(ends)
    for block in blocks:
        first, last = block.ends
        if first < ends.get(block.rank, 0):
            return f"has report {first} of rank {block.rank}, which an earlier file has too"
        later_ends[block.rank] = max(later_ends.get(block.rank, 0), last + 1)
    ends.update(later_ends)
    return ""
