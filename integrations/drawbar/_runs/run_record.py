"""`RunRecord`: a run as its directory describes it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
from msgspec.structs import replace

from drawbar._base.metrics import Metrics
from drawbar._history.run_history import RunHistory
from drawbar._observe.goodput import Goodput
from drawbar._observe.html import extract_curves
from drawbar._observe.rank_times import Straggler
from drawbar._observe.run_goodput import compute_goodput
from drawbar._process.errors import CheckpointError, RunInProgressError
from drawbar._records.events import HealthDecided, RanksRecovered, RunStarted, StragglerFound
from drawbar._records.report_ranges import (
    describe_missing,
    find_missing_reports,
    list_committed_names,
)
from drawbar._records.run_progress import RunProgress
from drawbar._records.timeline import FINAL_STATUSES, Timeline
from drawbar._runs.cleanup import UnusedFile, delete_run, find_unused_files
from drawbar._runs.report_columns import ReportColumns, select_columns
from drawbar._runs.run_output import RunOutput
from drawbar._storage.contents import MANIFEST_FILE
from drawbar._storage.external_checkpoints import INDEX_FILE
from drawbar._storage.journal_file import is_locked
from drawbar._storage.manifest import Manifest
from drawbar._storage.report_files import REPORTS_DIRECTORY
from drawbar._storage.run_directory import describe_resume

INTERRUPTED = "interrupted"
UNKNOWN = "unknown"
_LAUNCH_PATTERN = re.compile(r"\bdrawbar(\.cli|/cli/__main__\.py)? launch\b")


@dataclass(frozen=True)
class RunEvents(RunOutput):
    """Events and reports of a run, which do not depend on whether it is in progress."""

    _history: RunHistory

    # -- starts and attempts

    @property
    def config(self) -> dict[str, object]:
        """Configuration of the last start, as JSON values and reprs."""
        return self._history.state.config

    @property
    def start_time(self) -> float | None:
        """Time of the first start, in seconds since the epoch; None if the journal is lost."""
        return self._history.events[0].time if self._history.events else None

    @property
    def drawbar_version(self) -> str:
        """Version of Drawbar that started the run last; "" if it is unknown."""
        return start.drawbar_version if (start := self._last_start) else ""

    @property
    def environment(self) -> dict[str, str]:
        """Command, directory, commit, host, system, and Python version of the last start.

        Values that were not recorded are missing.
        """
        return start.environment if (start := self._last_start) else {}

    @property
    def is_launched(self) -> bool:
        """True if `drawbar launch` made the last start."""
        return _LAUNCH_PATTERN.search(self.environment.get("command", "")) is not None

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the frameworks that were installed at the last start, by package."""
        return start.versions if (start := self._last_start) else {}

    @property
    def _last_start(self) -> RunStarted | None:
        starts = [event for event in self._history.events if isinstance(event, RunStarted)]
        return starts[-1] if starts else None

    @property
    def last_event_time(self) -> float | None:
        """Time of the last event or report in seconds since the epoch; None if there is none."""
        return self._history.last_time

    @property
    def timeline(self) -> Timeline:
        """Attempts of the run, with their durations and outcomes."""
        return self._history.state.timeline

    @property
    def stragglers(self) -> list[Straggler]:
        """Ranks that were slower than the others, in the order in which they were found."""
        return [
            Straggler(event.rank, event.part, event.ratio, event.seconds_per_step)
            for event in self._history.events
            if isinstance(event, StragglerFound)
        ]

    @property
    def recoveries(self) -> list[RanksRecovered]:
        """Recoveries in place, in order."""
        return [event for event in self._history.events if isinstance(event, RanksRecovered)]

    @property
    def health_decisions(self) -> list[HealthDecided]:
        """Decisions of the health checks, in order."""
        return [event for event in self._history.events if isinstance(event, HealthDecided)]

    @property
    def error(self) -> str:
        """Error of a failed run; "" if it did not fail."""
        return self._history.state.error

    @property
    def metrics(self) -> Metrics | None:
        """Last metrics of the lowest rank that reported, usually rank 0; None without reports."""
        return self._history.last_metrics

    # -- events and reports

    def list_events(self) -> list[dict[str, object]]:
        """Return the readable events of the journal as JSON values, in order.

        Returns:
            Events. `event` is the type, `time` is in seconds since the epoch, and the other keys
            are the attributes of the type in `drawbar.train.events`. Its name is there in snake
            case, with four exceptions: "checkpoint" is `CheckpointCommitted`, "ranks_quiet" is
            `RanksStalled`, "straggler" is `StragglerFound`, and "recovered_in_place" is
            `RanksRecovered`. Other types are only in the journal, such as "run_started",
            "workers_started", "program_started", "first_report", "dataset_pass" (a rank has read
            its shard to the end), "reports_lost", and "preemption_announced".

        Example:
            Print the types of the events of a run:

                print([event["event"] for event in runs.find_run("experiment").list_events()])
        """
        return [msgspec.to_builtins(event) for event in self._history.events]

    def list_report_rows(self) -> list[Metrics]:
        """Return a table of all reports that count, like `Result.metrics_dataframe`.

        Returns:
            One row for each report and rank, sorted by report and rank.
        """
        return list(self.iter_report_rows())

    def iter_report_rows(self) -> Iterator[Metrics]:
        """Yield the rows of `list_report_rows`, without keeping all of them in memory.

        Yields:
            One row for each report and rank, sorted by report and rank.

        Example:
            Print the loss of each report:

                for row in runs.find_run("experiment").iter_report_rows():
                    print(row["rank"], row["index"], row.get("loss"))
        """
        yield from self._history.iter_rows()

    def iter_report_columns(
        self, *, rank: int | None = None, is_sampled: bool = False
    ) -> Iterator[ReportColumns]:
        """Yield the reports that count in columns, which is faster than rows.

        Args:
            rank: Rank whose reports are read. Default: all ranks.
            is_sampled: Whether to return only the lowest rank and, of a long run, some reports.

        Yields:
            Blocks of reports, roughly in order.

        Example:
            Print the highest loss of a run:

                run = runs.find_run("experiment")
                print(max(max(block.metrics["loss"]) for block in run.iter_report_columns()))
        """
        history = self._history
        stored = (block for _, block in history.iter_blocks(rank))
        yield from select_columns(history.iter_sampled_blocks() if is_sampled else stored)

    def get_curves(self, *, is_sampled: bool = False) -> dict[str, dict[int, float]]:
        """Return the numeric metrics of the lowest rank, for plots.

        Args:
            is_sampled: Whether to return only some points of a run with more than 100,000 reports,
                which is faster.

        Returns:
            For each metric, its value by report number.
        """
        return extract_curves(self._history, is_sampled=is_sampled)


@dataclass(frozen=True)
class RunRecord(RunEvents):
    """A run as its directory describes it, also if it is in progress, interrupted, or damaged.

    Returned by `find_run` and `list_runs`. Reading a run neither unpickles nor writes anything, and
    does not need Ray.

    Attributes:
        damage: Description of the parts that could not be read; "" if there are none. The other
            attributes use the readable parts.

    Example:
        Print the state and the newest checkpoint of a run:

            run = runs.find_run("/shared/runs/experiment")
            print(run.status, run.metrics)
            print([manifest.name for manifest in run.list_checkpoints()][-1:])
    """

    damage: str = ""
    _listed_name: str = ""

    @property
    def name(self) -> str:
        """Name of the run, with the directories between it and the storage path that lists it."""
        return self._listed_name or self._directory.name

    @property
    def path(self) -> str:
        """Path or URI of the run's directory."""
        return self._directory.uri

    @property
    def storage_path(self) -> str:
        """Path or URI of the storage in which the run has its name."""
        storage = self._directory.root
        for _ in self.name.split("/"):
            storage = storage.parent
        return str(storage)

    @property
    def status(self) -> str:
        """Status of the run.

        In progress: "starting", "running", or "restarting". Ended: "finished", "failed", or
        "stopped". "interrupted" means that the process that controlled the run is dead. "unknown"
        means that the journal is lost, or that a run in an object store has not ended and is not
        controlled by a process of this machine.
        """
        if not self._history.events:
            return UNKNOWN
        status = self._history.state.status
        if status in FINAL_STATUSES or is_locked(self._directory.journal_path):
            return status
        # The lock is held on the driver's machine. There are no locks in an object store.
        return INTERRUPTED if self._directory.remote_path is None else UNKNOWN

    @property
    def goodput(self) -> Goodput:
        """Productive share of the time of the run; until now if it is in progress."""
        is_active = self.status not in (*FINAL_STATUSES, INTERRUPTED, UNKNOWN)
        return compute_goodput(self._history, is_active=is_active)

    @property
    def resume_hint(self) -> str:
        """Arguments of `RunConfig` that resume the run; "" unless it failed or was interrupted."""
        can_resume = self.status in ("failed", "stopped", INTERRUPTED)
        return describe_resume(self._directory) if can_resume else ""

    @property
    def progress(self) -> RunProgress | None:
        """Progress that the training function has set last; None if it has set none.

        The journal has it as of the last commit, the end of the run, or at most 30 s ago. After the
        end of the run, it has no rate and no ETA.
        """
        progress = self._history.state.progress
        if progress is None or self.status in (*FINAL_STATUSES, INTERRUPTED):
            return progress and replace(progress, rate=None)
        return progress

    # -- files

    def list_checkpoints(self) -> list[Manifest]:
        """Return the committed checkpoints, without checking their files.

        Returns:
            The readable manifests, oldest first.
        """
        return self.inspect_checkpoints()[0]

    def inspect_checkpoints(self) -> tuple[list[Manifest], dict[str, str]]:
        """Return the committed checkpoints, and the reason for each that cannot be read.

        Returns:
            The readable manifests, oldest first, and the reasons by name. The names can include the
            index of external checkpoints, those checkpoints, and, unless the run is in progress,
            missing checkpoints that the journal has.
        """
        manifests, errors = self._directory.checkpoints.list_readable()
        if self.status in (*FINAL_STATUSES, INTERRUPTED):
            missing = sorted(
                list_committed_names(self._history.events)
                - {manifest.name for manifest in manifests}
                - set(errors)
            )
            reason = f"it does not exist, or has no readable {MANIFEST_FILE}"
            errors |= dict.fromkeys(missing, reason)
        return manifests, errors

    def verify_checkpoints(self) -> Iterator[tuple[str, str]]:
        """Check every checkpoint against its manifest and checksums.

        Checkpoints that are in the journal but do not exist are included. So are the index of
        external checkpoints and the segments with reports if they are damaged. If reports are
        missing, the name is "reports".

        Yields:
            The name of each checkpoint, and its damage or "".

        Example:
            Print the damaged checkpoints of a run:

                for name, damage in runs.find_run("experiment").verify_checkpoints():
                    if damage:
                        print(name, damage)
        """
        manifests, errors = self._directory.checkpoints.list_readable()
        if INDEX_FILE in errors:
            yield INDEX_FILE, errors.pop(INDEX_FILE)
        # While a run is active, checkpoints may be newer than the events that were read.
        is_over = self.status in (*FINAL_STATUSES, INTERRUPTED)
        missing = []
        if is_over and self._history.events:
            missing = find_missing_reports(self._history.events, self._history.reports, manifests)
        if missing:
            checkpoint = missing[0].checkpoint
            reason = f", which are older than {checkpoint}," if checkpoint else ""
            yield REPORTS_DIRECTORY, f"{describe_missing(missing)}{reason} are missing"
        yield from sorted(self._history.reports.check_all().items())
        damaged = self._directory.checkpoints.list_damaged()
        names = (
            {manifest.name for manifest in manifests}
            | errors.keys()
            | list_committed_names(self._history.events)
        )
        for name in sorted(names.union(damaged)):
            yield name, self.verify_checkpoint(name)

    def verify_checkpoint(self, name: str) -> str:
        """Check the files of a checkpoint against its manifest and checksums.

        Args:
            name: Name of the checkpoint.

        Returns:
            Its damage; "" if it is intact.
        """
        try:
            self._directory.checkpoints.get_checkpoint(name).verify()
        except OSError as error:
            return f"{error.filename}: {error.strerror}" if error.filename else str(error)
        except (CheckpointError, ImportError, ValueError) as error:
            return str(error)
        return ""

    def find_unused_files(self, num_to_keep: int | None = None) -> Iterator[UnusedFile]:
        """Find files that are no longer needed, without removing them.

        These are files that were never committed and, with `num_to_keep`, old checkpoints. There
        are none while the run is in progress, and none of an unfinished run in an object store,
        because another machine may be running it. `UnusedFile.remove()` preserves files that the
        user moved to Drawbar and that exist nowhere else.

        Args:
            num_to_keep: Number of checkpoints to keep, as in `CheckpointConfig`: the best by the
                run's score, and the newest. None keeps all.

        Yields:
            Files that can be removed.

        Example:
            Delete all but the two best checkpoints and the newest one of a run:

                for file in runs.find_run("experiment").find_unused_files(num_to_keep=2):
                    file.remove()
        """
        if self.status != UNKNOWN:
            yield from find_unused_files(self._directory, self._history.events, num_to_keep)

    def delete(self, *, force: bool = False) -> None:
        """Delete the run: its directory with checkpoints, reports, logs, and files of the user.

        Checkpoints in other directories, which were committed with NO_UPLOAD, are not deleted.

        Args:
            force: Whether to delete a run in an object store that has not ended according to its
                journal. Drawbar cannot check whether another machine is still running it.

        Raises:
            RunInProgressError: The run is in progress, or may be.
            ValueError: The directory contains other runs, or is a symbolic link.
            OSError: The storage cannot be written.
        """
        status = self.status
        if status not in (*FINAL_STATUSES, INTERRUPTED, UNKNOWN):
            stop = f"Stop it first, for example with: drawbar stop {self.path}"
            raise RunInProgressError(f"Run {self.name!r} is {status}. {stop}")
        if status == UNKNOWN and self._history.events and not force:
            raise RunInProgressError(
                f"Run {self.name!r} in {self.storage_path} has not ended, and another machine may "
                "be running it. Stop it there, or use force=True (drawbar delete --force)."
            )
        delete_run(self._directory)
