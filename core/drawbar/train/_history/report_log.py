"""Write the reports of a run to segments; see `_storage/report_files.py`."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from drawbar.train._history.events import ReportsReceived
from drawbar.train._history.journal import Journal
from drawbar.train._history.report_blocks import (
    ReportBlock,
    SegmentSummary,
    decode_block,
    encode,
    make_blocks,
    merge_blocks,
    sample_lowest_rank,
    summarize,
)
from drawbar.train._history.stored_reports import StoredReports
from drawbar.train._storage import fault_points
from drawbar.train._storage.files import (
    inherit_directory_mode,
    is_current_file,
    read_regular_file,
    write_atomically,
)
from drawbar.train._storage.journal_file import append_lines, strip_torn_line
from drawbar.train._storage.manifest import DECODE_ERRORS
from drawbar.train._storage.report_files import (
    REPORTS_DIRECTORY,
    Segment,
    compress_segment,
    list_superseded,
)
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._threads import DaemonThreadPool

SEGMENT_BYTES = 8 * 2**20
"""Size at which a segment is closed and compressed."""

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
        for block in blocks:
            self._last[reports.rank] = block.select(slice(-1, None))

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
        segment.last_before = dict(self._last)
        self._open = segment
        return segment

    def _close_segment(self, segment: _OpenSegment) -> None:
        segment.file.close()
        self._open = None
        self._compressor.submit(
            _compress_and_log_errors, self._directory, segment.name, segment.last_before
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
        self.last_before: Mapping[int, ReportBlock] = {}
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
    directory: RunDirectory, segment: Segment, last_before: Mapping[int, ReportBlock]
) -> None:
    try:
        compress_open_segment(directory, segment, last_before)
    except FileNotFoundError:
        pass  # the run directory was deleted, which the next write reports
    # The open segment has all reports, and the next start compresses it.
    except Exception as error:
        _logger.warning("%s was not compressed: %s", directory.local_path / segment.path, error)


def compress_open_segment(
    directory: RunDirectory,
    segment: Segment,
    last_before: Mapping[int, ReportBlock],
    lines: bytes | None = None,
) -> SegmentSummary:
    """Replace an open segment with a closed one.

    Args:
        directory: Directory of the run.
        segment: The open segment.
        last_before: Last report of each rank in earlier segments of the attempt.
        lines: Lines to store. Default: the complete lines of the open segment.

    Returns:
        The summary of the segment.

    Raises:
        OSError: The segment cannot be read or written.
        Exception: One of `DECODE_ERRORS`: a line is damaged.
    """
    path = directory.local_path / segment.path
    if lines is None:
        lines = strip_torn_line(read_regular_file(path))
    blocks = [decode_block(line) for line in lines.splitlines()]
    summary = summarize(blocks, last_before)
    if blocks:
        merged = merge_blocks(blocks)
        summary.sample = sample_lowest_rank(merged)
        closed = Segment(segment.attempt, segment.first, segment.first + summary.num_reports)
        closed_path = directory.local_path / closed.path
        write_atomically(
            closed_path,
            compress_segment(encode(summary), b"".join(encode(block) + b"\n" for block in merged)),
            temp_directory=directory.staging.path if directory.staging.path.is_dir() else None,
        )
        inherit_directory_mode(closed_path)
        fault_points.maybe_stop_at("reports.compressed")
    os.unlink(path)
    return summary


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
                lines = strip_torn_line(read_regular_file(directory.local_path / segment.path))
                kept = b"".join(line for line in lines.splitlines(True) if _is_readable(line))
                last = compress_open_segment(directory, segment, last, kept).last
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


def _is_readable(line: bytes) -> bool:
    try:
        decode_block(line)
    except DECODE_ERRORS:
        return False
    return True
