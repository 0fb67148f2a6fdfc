"""Write the reports of a run to segments; see `_storage/report_files.py`."""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import os
import tempfile
from array import array
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, BinaryIO

from drawbar._process.threads import DaemonThreadPool
from drawbar._records.journal import Journal
from drawbar._records.live_events import ReportsReceived
from drawbar._records.report_blocks import (
    NUM_SAMPLES,
    ReportBlock,
    SegmentSummary,
    decode_block,
    decode_rank,
    encode,
    make_blocks,
    merge_blocks,
)
from drawbar._records.stored_reports import StoredReports
from drawbar._storage import fault_points
from drawbar._storage.files import (
    inherit_directory_mode,
    is_current_file,
    open_regular_file,
    write_atomically,
)
from drawbar._storage.journal_file import append_lines
from drawbar._storage.manifest import DECODE_ERRORS
from drawbar._storage.report_files import (
    REPORTS_DIRECTORY,
    Segment,
    compress,
    list_superseded,
)
from drawbar._storage.run_directory import RunDirectory

SEGMENT_BYTES = 8 * 2**20
"""Size at which a segment is closed and compressed."""

_COPY_BYTES = 64 * 1024

_logger = logging.getLogger("drawbar.train")


class ReportLog:
    """Reports of a run that is in progress.

    A batch of reports is one write. It survives the death of this process. Segments are compressed
    in a thread.

    Args:
        directory: Directory of the run.
        journal: Open journal of the run, whose lock this process holds.
    """

    def __init__(self, directory: RunDirectory, journal: Journal) -> None:
        self._directory = directory
        self._journal = journal
        self._open: _OpenSegment | None = None
        self._last: dict[int, ReportBlock] = {}  # by rank: last report of the attempt
        self._compressor = DaemonThreadPool(1, "drawbar-reports")

    def append(self, reports: ReportsReceived) -> None:
        """Write reports, so that they survive the death of this process.

        Raises:
            OSError: The reports cannot be written, or their file was deleted or moved.
        """
        blocks = make_blocks(reports.rank, reports.indices, reports.times, reports.metrics)
        segment = self._get_segment(reports)
        # The path may no longer refer to the open file. Reports in a deleted file would be lost.
        if not is_current_file(segment.path, segment.file.fileno()):
            self._journal.check_current(_describe(reports))
            raise FileNotFoundError(
                f"{self._directory.local_path} or its reports were deleted or moved during the "
                f"run, so this event cannot be written: {_describe(reports)}"
            )
        lines = b"".join(encode(block) + b"\n" for block in blocks)
        append_lines(segment.file, lines)
        fault_points.maybe_stop_at("reports.written")
        segment.nbytes += len(lines)
        segment.num_reports += len(reports.indices)
        self._last[reports.rank] = blocks[-1].select_last()

    def _get_segment(self, reports: ReportsReceived) -> _OpenSegment:
        segment = self._open
        if segment is not None and segment.name.attempt != reports.attempt:
            self._close_segment(segment)
            self._last = {}
            segment = None
        first = 0
        if segment is not None:
            if segment.nbytes < SEGMENT_BYTES:
                return segment
            first = segment.name.first + segment.num_reports
            self._close_segment(segment)
        # A deleted run directory must not be created again.
        self._journal.check_current(_describe(reports))
        segment = _OpenSegment(self._directory.local_path, Segment(reports.attempt, first))
        self._open = segment
        return segment

    def _close_segment(self, segment: _OpenSegment) -> None:
        segment.file.close()
        self._open = None
        self._compressor.submit(
            _compress_and_log_errors, self._directory, segment.name, dict(self._last)
        )

    def close(self) -> None:
        """Close the open segment, and wait until all segments are compressed."""
        if self._open is not None:
            self._close_segment(self._open)
        self._compressor.shutdown()


class _OpenSegment:
    """Segment to which reports are appended."""

    def __init__(self, run_path: Path, name: Segment) -> None:
        self.name = name
        self.path = run_path / name.path
        self.nbytes = 0
        self.num_reports = 0
        directory = run_path / REPORTS_DIRECTORY
        if not directory.exists():
            directory.mkdir()
            inherit_directory_mode(directory)
        # Unbuffered: the kernel has the lines when write() returns, so a kill does not lose them.
        self.file: IO[bytes] = open(self.path, "wb", buffering=0)  # noqa: SIM115
        inherit_directory_mode(self.path)


def _describe(reports: ReportsReceived) -> str:
    first, last = reports.indices[0], reports.indices[-1]
    numbers = f"report {first}" if first == last else f"reports {first} to {last}"
    return f"{numbers} of rank {reports.rank}"


def _compress_and_log_errors(
    directory: RunDirectory, segment: Segment, last: Mapping[int, ReportBlock]
) -> None:
    try:
        compress_open_segment(directory, segment, last)
    except FileNotFoundError:
        pass  # the run directory was deleted, which the next write reports
    # The open segment has all reports, and the next start compresses it.
    except Exception as error:
        _logger.warning("%s was not compressed: %s", directory.local_path / segment.path, error)


def compress_open_segment(
    directory: RunDirectory,
    segment: Segment,
    last: Mapping[int, ReportBlock],
    *,
    should_skip_damaged: bool = False,
) -> SegmentSummary:
    """Replace an open segment with a closed one, sorted by rank.

    The memory that this needs does not depend on the size of the segment.

    Args:
        directory: Directory of the run.
        segment: The open segment.
        last: Last report of each rank in the attempt. Reports of the open segment may be missing.
        should_skip_damaged: Whether damaged lines are left out.

    Returns:
        The summary of the segment.

    Raises:
        OSError: The segment cannot be read or written.
        Exception: One of `DECODE_ERRORS`: a line is damaged.
    """
    path = directory.local_path / segment.path
    temp_directory = directory.staging.path if directory.staging.path.is_dir() else None
    summary = SegmentSummary(last=dict(last))
    with (
        open_regular_file(path) as source,
        tempfile.TemporaryFile(dir=temp_directory or path.parent) as compressed,
    ):
        lines = _LinesByRank(source, should_skip_damaged)
        compressed.writelines(compress(encode(block) + b"\n" for block in _merge(lines, summary)))
        if summary.ranges:
            closed = Segment(segment.attempt, segment.first, segment.first + summary.num_reports)
            closed_path = directory.local_path / closed.path
            compressed.seek(0)
            chunks = itertools.chain(
                compress([encode(summary), b"\n"]),
                iter(functools.partial(compressed.read, _COPY_BYTES), b""),
            )
            write_atomically(closed_path, chunks, temp_directory=temp_directory)
            inherit_directory_mode(closed_path)
            fault_points.maybe_stop_at("reports.compressed")
    os.unlink(path)
    return summary


class _LinesByRank:
    """Complete lines of an open segment. Only their positions are in memory.

    Args:
        file: The segment.
        should_skip_damaged: Whether damaged lines are left out.
    """

    def __init__(self, file: BinaryIO, should_skip_damaged: bool) -> None:
        self._file = file
        self._ignored_errors = DECODE_ERRORS if should_skip_damaged else ()
        self._positions: dict[int, array[int]] = {}
        position = 0
        for line in file:
            if not line.endswith(b"\n"):  # torn
                break
            with contextlib.suppress(*self._ignored_errors):
                self._positions.setdefault(decode_rank(line), array("q")).append(position)
            position += len(line)

    @property
    def ranks(self) -> list[int]:
        """Ranks in ascending order."""
        return sorted(self._positions)

    def read(self, rank: int) -> Iterator[ReportBlock]:
        """Yield the blocks of a rank in the order of their arrival."""
        for position in self._positions[rank]:
            self._file.seek(position)
            with contextlib.suppress(*self._ignored_errors):
                yield decode_block(self._file.readline())


def _merge(lines: _LinesByRank, summary: SegmentSummary) -> Iterator[ReportBlock]:
    """Yield merged blocks, rank by rank, and complete the summary."""
    for number, rank in enumerate(lines.ranks):
        # Curves show the lowest rank.
        step = max(1, sum(map(len, lines.read(rank))) // NUM_SAMPLES) if number == 0 else 0
        for block in merge_blocks(summary.add_each(lines.read(rank))):
            if step:
                # From the end, so that the last report is included.
                rows = range((len(block) - 1) % step, len(block), step)
                summary.sample.append(block.select(rows))
            yield block


def repair_segments(directory: RunDirectory, reports: StoredReports) -> None:
    """Compress the open segments of earlier processes, and move damaged segments to `broken`.

    The readable lines of a damaged open segment are kept.

    Args:
        directory: Directory of the run, whose lock this process holds.
        reports: Reports of the run, not in strict mode.
    """
    for attempt in reports.list_attempts():
        last: dict[int, ReportBlock] = {}
        for segment in reports.list_segments(attempt):
            if segment.path in reports.damage:
                _copy_to_broken(directory, segment)
            if segment.end is None:
                last = compress_open_segment(
                    directory, segment, last, should_skip_damaged=True
                ).last
            elif segment.path in reports.damage:
                directory.run_files.delete(segment.path)
            else:
                last = reports.get_summary(segment).last
    # A process may have been killed after it had compressed a segment.
    for name in list_superseded(directory.run_files.list_reports()):
        directory.run_files.delete(f"{REPORTS_DIRECTORY}/{name}")


def _copy_to_broken(directory: RunDirectory, segment: Segment) -> None:
    broken = directory.local_path / "broken"
    broken.mkdir(exist_ok=True)
    data = directory.run_files.read_report(segment.file_name)
    if data is not None:
        (broken / segment.file_name).write_bytes(data)
