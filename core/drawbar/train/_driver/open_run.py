"""Open a run directory: lock it, read its history, decide how to resume, and journal the start."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import os
import platform
import re
import secrets
import subprocess
import time
import uuid
from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

from drawbar._base.secrets import redact_arguments
from drawbar._base.time_limits import resolve_stop_before
from drawbar._base.train_function import FunctionIdentity
from drawbar._base.wording import escape_surrogates
from drawbar._process.driver_env import DriverEnvironment
from drawbar._records.events import (
    AttemptEndCause,
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointDeleted,
    JournaledEvent,
    RanksRecovered,
    ReportsLost,
    RunEnded,
    RunStarted,
)
from drawbar._records.journal import Journal
from drawbar._records.report_log import ReportLog, repair_segments
from drawbar._records.report_ranges import (
    describe_missing,
    find_missing_reports,
    get_checkpoint_indices,
    list_committed_names,
    list_rollbacks,
    make_run_state,
)
from drawbar._records.rollback import remove_discarded
from drawbar._records.stored_reports import StoredReports
from drawbar._records.timeline import RunState
from drawbar._recovery.failure_policy import list_failed_attempts
from drawbar._recovery.resume import RunDirectoryState, decide_resume, list_config_changes
from drawbar._storage.checkpoint_store import quarantine, split_damaged, uncommit
from drawbar._storage.default_storage import get_default_storage_path
from drawbar._storage.files import inherit_directory_mode
from drawbar._storage.filesystem import resolve_path
from drawbar._storage.manifest import Manifest
from drawbar._storage.run_directory import RunDirectory, make_run_directory
from drawbar._storage.write_checks import check_storage_path
from drawbar.train._config.run_config import RunConfig
from drawbar.train._controller.run import OpenRun, RunSpec

_PACKAGES = (
    *("ray", "torch", "lightning", "pytorch-lightning", "transformers", "accelerate", "deepspeed"),
    *("tensorflow", "keras", "jax", "xgboost", "xgboost-cpu", "lightgbm", "numpy"),
)

_GIT_TIMEOUT_S = 2.0  # on a slow network filesystem


def get_run_directory(config: RunConfig) -> RunDirectory:
    """Return the directory of a run whose config has a name and a storage path.

    Raises:
        ImportError: The package for the filesystem is not installed.
        ValueError: `storage_path` or `storage_filesystem` is invalid.
        TypeError: `storage_path` or `storage_filesystem` has a wrong type.
    """
    assert config.name is not None  # see `add_defaults`
    assert config.storage_path is not None
    storage = resolve_path(config.storage_path, config.storage_filesystem)
    return make_run_directory(storage / config.name)


def add_defaults(config: RunConfig) -> RunConfig:
    """Set the default storage path and name; move the directories in a name to the storage path.

    A time before the end of the job becomes an absolute time.

    This process sets the defaults, also if another process opens the run.

    Raises:
        ImportError: The package for the filesystem is not installed.
        ValueError: `storage_path`, `storage_filesystem`, or the default storage path is invalid.
        TypeError: `storage_path` or `storage_filesystem` has a wrong type.
        OSError: The configuration file cannot be read.
    """
    storage_path = config.storage_path or get_default_storage_path()
    stop_before = resolve_stop_before(config.stop_before)
    config = dataclasses.replace(config, storage_path=storage_path, stop_before=stop_before)
    if config.name is None:
        name = f"drawbar_{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(3)}"
        return dataclasses.replace(config, name=name)
    *directories, name = PurePath(config.name).parts
    if not directories:
        return config
    storage = resolve_path(storage_path, config.storage_filesystem) / "/".join(directories)
    return dataclasses.replace(config, name=name, storage_path=str(storage))


def open_run(spec: RunSpec) -> OpenRun:
    """Lock a run directory, decide how to resume from it, and delete uncommitted files.

    The spec's settings are written to the journal. The warning names those that have changed since
    the last start.

    Raises:
        ResumeError: The content of the directory conflicts with `RunConfig.resume`, or the run has
            finished with another training function.
        RunInProgressError: The run is in progress, in this process or another one.
        OSError: The storage cannot be written.
    """
    directory, resume = get_run_directory(spec.run_config), spec.run_config.resume
    if not directory.has_run():  # checked first, so that an error creates no files
        decide_resume(RunDirectoryState.NONE, resume, path=directory.uri, latest=None)
    # Checked first, because `check_storage_path` creates the directory.
    is_new = not directory.local_path.exists()
    check_storage_path(directory.local_path)
    if is_new:
        inherit_directory_mode(directory.local_path)
    journal = Journal(directory.journal_path)
    try:  # from here on, no other process writes to the run or deletes its directories
        # Under the lock, so that the state does not change after it was read.
        directory.run_files.sync_journal(journal)
        existing = _inspect_directory(directory, journal, spec)
        # After the inspection: if `resume` forbids the start, all files stay unchanged.
        directory.clean_up()
        inherit_directory_mode(directory.journal_path)
        for name in existing.damaged:
            quarantine(directory.checkpoints, name)
        for name in existing.discarded:
            uncommit(directory.checkpoints, name)
        repair_segments(directory, existing.reports)
        events = [*existing.events, *_journal_run_start(journal, spec, existing)]
    except BaseException:
        journal.close()
        raise
    return OpenRun(
        spec=spec,
        run_id=existing.run_id,
        directory=directory,
        journal=journal,
        reports=ReportLog(directory, journal),
        state=make_run_state(events, existing.reports),
        next_attempt=existing.next_attempt,
        failure_counts=Counter(_list_failures_since_last_end(existing.events)),
        failed_attempts=list_failed_attempts(events),
        warning=_append_config_changes(existing.warning, existing.run_starts, spec.config_record),
        had_finished=_has_finished(existing.events),
        rollbacks=list_rollbacks(existing.events),
    )


@dataclass(frozen=True)
class _ExistingRun:
    """Contents of a run directory at a start.

    Attributes:
        events: Events in the journal.
        reports: Reports of earlier attempts.
        intact: Manifests of the intact checkpoints, oldest first.
        damaged: Names of newer checkpoints that are damaged or missing.
        discarded: Names of checkpoints that a rollback has not yet removed.
        warning: How the run is resumed, if that needs attention.
        lost: Reports that are missing.
    """

    events: list[JournaledEvent]
    reports: StoredReports
    intact: list[Manifest]
    damaged: Collection[str]
    discarded: Collection[str]
    warning: str
    lost: list[ReportsLost]

    @property
    def run_starts(self) -> list[RunStarted]:
        return [event for event in self.events if isinstance(event, RunStarted)]

    @cached_property
    def run_id(self) -> str:
        run_ids = [event.run_id for event in self.run_starts]
        run_ids += [
            manifest.run_id for manifest in reversed(self.intact)
        ]  # the journal may be lost
        return next(filter(None, run_ids), uuid.uuid4().hex)

    @property
    def next_attempt(self) -> int:
        attempts = [event.attempt for event in self.events if isinstance(event, AttemptStarted)]
        # Numbers must be unique even without a journal, because commands are matched by them.
        attempts += [manifest.attempt for manifest in self.intact]
        attempts += self.reports.list_attempts()
        return max(attempts, default=-1) + 1


def _inspect_directory(directory: RunDirectory, journal: Journal, spec: RunSpec) -> _ExistingRun:
    """Read the run directory and decide how to resume from it."""
    checkpoints = directory.checkpoints
    events, damage = _recover_journal(directory, journal)
    committed = checkpoints.list_committed()
    remaining = remove_discarded(committed, list_rollbacks(events))
    # They still exist if the driver was killed during the rollback.
    discarded = {each.name for each in committed} - {each.name for each in remaining}
    manifests, altered = split_damaged(checkpoints, remaining)
    intact = [manifest for manifest in manifests if checkpoints.is_intact(manifest.name)]
    damage = [part for part in damage if part not in altered] + list(altered.values())
    reports = StoredReports(directory.run_files, strict=False)
    lost = find_missing_reports(events, reports, intact) if events else []
    damage += [f"its reports: {description}" for description in reports.damage.values()]
    if lost:
        before = f" from before {lost[0].checkpoint}" if lost[0].checkpoint else ""
        damage.append(f"its {describe_missing(lost)}{before}, which are missing")
    warning = decide_resume(
        _classify_directory(events, damage),
        spec.run_config.resume,
        path=directory.uri,
        latest=intact[-1].name if intact else None,
        damage=damage,
        conflict=_conflicting_functions(events, spec.function),
    )
    missing = _missing_checkpoints(events, intact)
    damaged = {*altered, *missing} - discarded
    return _ExistingRun(events, reports, intact, damaged, discarded, warning, lost)


def _conflicting_functions(
    events: list[JournaledEvent], function: FunctionIdentity
) -> tuple[str, str] | None:
    """Return the functions of a finished run and of the trainer if they differ, else None."""
    starts = [event.function for event in events if isinstance(event, RunStarted)]
    earlier = starts[-1] if starts else None
    if earlier is None or earlier.is_same(function) or not _has_finished(events):
        return None
    return str(earlier), str(function)


def _has_finished(events: list[JournaledEvent]) -> bool:
    # Not the last event: deletions by `drawbar clean` may follow the end.
    return RunState.from_events(events).status == "finished"


def _missing_checkpoints(events: list[JournaledEvent], intact: list[Manifest]) -> list[str]:
    """List checkpoints that were committed after the latest intact one: their files are lost."""
    latest = intact[-1].index if intact else -1
    return [name for name, index in get_checkpoint_indices(events).items() if index > latest]


def _journal_run_start(
    journal: Journal, spec: RunSpec, existing: _ExistingRun
) -> list[JournaledEvent]:
    """Journal the start, and the differences between the run directory and the journal."""
    now = time.time()
    start = RunStarted(
        time=now,
        run_id=existing.run_id,
        name=spec.name,
        config=spec.config_record,
        detached=spec.run_config.detached,
        function=spec.function,
        drawbar_version=importlib.metadata.version("drawbar"),
        environment=describe_environment(spec.worker_spec.driver_env, spec.run_config.secret_keys),
        versions=list_versions(),
    )
    names = [*existing.damaged, *existing.discarded]
    deleted = [CheckpointDeleted(time=now, name=name) for name in names]
    commits = _find_unjournaled_commits(existing)
    events: list[JournaledEvent] = [start, *existing.lost, *deleted, *commits]
    for event in events:
        journal.append(event)
    return events


def _find_unjournaled_commits(existing: _ExistingRun) -> list[CheckpointCommitted]:
    """Return the checkpoints that are newer than the journal.

    There is one if a driver was killed between a commit and its journal entry, and there may be
    several if the journal was truncated.
    """
    commits = [event for event in existing.events if isinstance(event, CheckpointCommitted)]
    # By report and not by name, because a name may have been reused. The attempt comes first,
    # because reports are numbered from an earlier number after a rollback.
    latest = max(((event.attempt, event.index) for event in commits), default=(-1, -1))
    unjournaled = [each for each in existing.intact if (each.attempt, each.index) > latest]
    return [CheckpointCommitted.of(manifest, seconds=0.0) for manifest in unjournaled]


def _append_config_changes(
    warning: str, starts: list[RunStarted], settings: dict[str, object]
) -> str:
    changes = list_config_changes(starts[-1].config, settings) if starts else []
    if not changes:
        return warning
    description = "changed since the run's last start: " + "; ".join(changes)
    return f"{warning}; {description}" if warning else description


def _list_failures_since_last_end(events: list[JournaledEvent]) -> list[AttemptEndCause]:
    """Return how attempts failed since the last end of the run, also under dead drivers."""
    ends: list[AttemptEndCause] = []
    for event in events:
        if isinstance(event, RunEnded):
            ends = []
        elif isinstance(event, AttemptEnded):
            ends.append(event.cause)
        elif isinstance(event, RanksRecovered):
            ends += ["worker"] * (event.num_deaths - event.num_preempted)
            ends += ["preemption"] * event.num_preempted
    return ends


def _recover_journal(
    directory: RunDirectory, journal: Journal
) -> tuple[list[JournaledEvent], list[str]]:
    """Return the events in the journal, and a description of each damaged part but reports."""
    events, is_complete = journal.recover()
    damage = (
        [] if is_complete else ["its journal, whose unreadable lines are now in journal.damaged"]
    )
    damage += directory.checkpoints.list_damaged(list_committed_names(events))
    if not events and is_complete and (damage or directory.checkpoints.list_committed()):
        damage.insert(0, "its journal, which is empty or missing, so that a new history begins")
    return events, damage


def _classify_directory(events: list[JournaledEvent], damage: list[str]) -> RunDirectoryState:
    if damage:
        return RunDirectoryState.DAMAGED
    if not events:
        return RunDirectoryState.NONE
    return RunDirectoryState.FINISHED if _has_finished(events) else RunDirectoryState.UNFINISHED


def describe_environment(
    driver: DriverEnvironment | None, secret_keys: Collection[str]
) -> dict[str, str]:
    """Return the command, directory, commit, host, system, and Python version of a driver.

    Secrets in the command are redacted.

    Args:
        driver: Environment of the driver; None if it is unknown.
        secret_keys: Additional names of options of the command whose values are redacted.
    """
    command = {}
    if driver is not None:
        command = {
            "command": redact_arguments(driver.argv, secret_keys),
            "directory": driver.working_directory,
            **_find_commit(driver.working_directory),
        }
    found = {**command, "host": platform.node(), **_describe_system()}
    return {key: escape_surrogates(text) for key, text in found.items()}


def _find_commit(directory: str) -> dict[str, str]:
    """Return the commit that Git has checked out in a directory, if there is one."""
    # A Git hook sets variables for its own repository.
    variables = {name: os.environ[name] for name in os.environ if not name.startswith("GIT_")}
    try:
        output = subprocess.check_output(
            ["git", "-C", directory, "rev-parse", "HEAD"],
            env=variables,
            stdin=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, ValueError, subprocess.SubprocessError):  # also without Git
        return {}
    match = re.fullmatch(rb"([0-9a-f]{40,64})\s*", output)
    return {"commit": match[1].decode()} if match else {}


@functools.cache
def _describe_system() -> dict[str, str]:
    return {"system": platform.platform(), "python": platform.python_version()}


@functools.cache
def list_versions() -> dict[str, str]:
    """Return the versions of the installed frameworks, by the names of their packages."""
    versions = {}
    for name in _PACKAGES:
        try:
            metadata = importlib.metadata.distribution(name).read_text("METADATA") or ""
        except importlib.metadata.PackageNotFoundError:
            continue
        # importlib.metadata.version() would parse the whole file, which takes ten times as long.
        if version := re.search(r"^Version: *(\S+)", metadata, re.MULTILINE):
            versions[name] = version[1]
    return versions
