"""`RunOutput`: the files that the processes of a run write, other than journal and reports."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from drawbar._observe.observation_recorder import RESOURCES
from drawbar._observe.rank_times import RANK_TIMES, RankTimesSample
from drawbar._observe.resources import ResourceSample
from drawbar._records.journal import decode_readable_events
from drawbar._records.timeline import FINAL_STATUSES, RunState
from drawbar._storage.files import compute_tree_size
from drawbar._storage.journal_file import is_locked, strip_torn_line
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.storage_path import read_file_or_none

_POLL_PERIOD_S = 0.2


@dataclass(frozen=True)
class RunOutput:
    """Logs, stacks, and samples of a run."""

    _directory: RunDirectory

    def read_rank_times(self) -> list[RankTimesSample]:
        """Return where the time of each rank went, sampled about every ten seconds.

        Returns:
            Samples of all attempts, oldest first; [] if the run has one worker or ended at once.

        Example:
            Print the steps of each rank:

                for sample in runs.find_run("experiment").read_rank_times():
                    print({rank: times.steps for rank, times in sample.ranks.items()})
        """
        return [line.to_sample() for line in RANK_TIMES.read(self._directory)]

    def read_resources(self) -> list[ResourceSample]:
        """Return the resource samples of all nodes: CPU, memory, GPUs, and free disk space.

        Each node is sampled every 10 s. Older samples of long runs are farther apart.

        Returns:
            The readable samples, in the order of their arrival; [] if there are none.

        Example:
            Print the memory that the processes of a run used:

                for sample in runs.find_run("experiment").read_resources():
                    print(sample.node, sample.time, sample.rss_bytes)
        """
        return RESOURCES.read(self._directory)

    def compute_size(self) -> int:
        """Return the total size of all files of the run in bytes."""
        root = self._directory.root
        if isinstance(root, Path):
            return compute_tree_size(root)
        return sum(file.size for file in root.list_files())

    def read_stacks(self) -> dict[int, str]:
        """Return the stacks of each rank from the last hang that was recorded on this machine.

        Returns:
            Text by rank; {} if no stacks were written.
        """
        directory = self._directory.local_path / "stacks"
        # difference.txt is written last: without it, the other files are still being written.
        dumps = sorted(directory.glob("*/difference.txt"), key=os.path.getmtime)
        files = dumps[-1].parent.glob("rank_*.txt") if dumps else ()
        texts = {
            int(file.stem.removeprefix("rank_")): file.read_text(errors="replace")
            for file in files
            if file.stem.removeprefix("rank_").isdecimal() and file.is_file()
        }
        return dict(sorted(texts.items()))

    def read_log(self, rank: int, offset: int = 0) -> bytes | None:
        """Return the output of a rank.

        Args:
            rank: Rank of the worker.
            offset: Number of bytes to skip.

        Returns:
            The output so far; None if there is no log of this rank.

        Raises:
            OSError: The storage cannot be read.

        Example:
            Print the output of rank 0 of a run:

                print((runs.find_run("experiment").read_log(0) or b"").decode())
        """
        return self._directory.read_log(rank, offset)

    def follow_log(self, rank: int) -> Iterator[bytes]:
        """Yield the output of a rank until the run ends.

        The log and the journal are read five times per second, from the last offset.

        Args:
            rank: Rank of the worker.

        Yields:
            New output, or b"" if there is none.

        Example:
            Print the output of rank 0 while a run is in progress:

                for data in runs.find_run("experiment").follow_log(0):
                    sys.stdout.buffer.write(data)
        """
        journal, state, journal_offset, log_offset = self._directory.journal_path, RunState(), 0, 0
        is_active = True
        while is_active:
            # The journal first: when it has the end of the run, the log is complete.
            lines = strip_torn_line(
                read_file_or_none(journal.parent, journal.name, journal_offset) or b""
            )
            journal_offset += len(lines)
            for event in decode_readable_events(lines)[0]:
                state.apply(event)
            is_active = state.status not in FINAL_STATUSES and is_locked(journal)
            new = self.read_log(rank, log_offset) or b""
            log_offset += len(new)
            yield new
            if is_active:
                time.sleep(_POLL_PERIOD_S)
