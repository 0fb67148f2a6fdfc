"""From a checked configuration to a run that can start: its directory held, Ray connected."""

from __future__ import annotations

import dataclasses
import secrets
import time
import uuid
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePath

from drawbar.train._config.function_identity import FunctionIdentity
from drawbar.train._config.run_config import DEFAULT_STORAGE_PATH, RunConfig
from drawbar.train._controller.decisions import count_used_budget
from drawbar.train._controller.run import OpenRun, RunSpec
from drawbar.train._driver.preflight import check_storage_path
from drawbar.train._driver.resume import RunDirectoryState, decide_resume, list_config_changes
from drawbar.train._history.events import (
    AttemptEndCause,
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointDeleted,
    JournaledEvent,
    ReportsLost,
    RunEnded,
    RunStarted,
)
from drawbar.train._history.journal import Journal, kept_indices, missing_reports
from drawbar.train._history.timeline import RunState
from drawbar.train._storage import upkeep
from drawbar.train._storage.files import inherit_directory_mode
from drawbar.train._storage.filesystem import resolve_path
from drawbar.train._storage.manifest import Manifest
from drawbar.train._storage.resume_point import quarantine, split_damaged
from drawbar.train._storage.run_directory import RunDirectory, make_run_directory


def get_run_directory(config: RunConfig) -> RunDirectory:
    """Give the directory that a run is to have. Its config has a name.

    Raises:
        ImportError, ValueError, TypeError: `storage_path` and `storage_filesystem` name no storage.
    """
    storage = resolve_path(config.storage_path or DEFAULT_STORAGE_PATH, config.storage_filesystem)
    assert config.name is not None  # the trainer has given it one
    return make_run_directory(storage / config.name)


def add_default_name(config: RunConfig) -> RunConfig:
    """Give a run a name, if it was given none; folders in it become the storage path's.

    Raises:
        ImportError, ValueError, TypeError: `storage_path` and `storage_filesystem` name no storage.
    """
    if config.name is None:
        name = f"drawbar_{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(3)}"
        return dataclasses.replace(config, name=name)
    *folders, name = PurePath(config.name).parts
    if not folders:
        return config
    storage = resolve_path(config.storage_path or DEFAULT_STORAGE_PATH, config.storage_filesystem)
    place = str(storage / "/".join(folders))
    return dataclasses.replace(config, name=name, storage_path=place)


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
    if not directory.has_run():  # an error leaves no trace
        decide_resume(RunDirectoryState.NONE, resume, path=directory.uri, latest=None)
    # Looked at first: the check that follows makes the folder.
    is_new = not directory.local_path.exists()
    check_storage_path(directory.local_path)
    if is_new:
        inherit_directory_mode(directory.local_path)
    journal = Journal(directory.journal_path)
    try:  # from here on nobody else writes to the run, or removes its folders
        # Under the lock: what is read from here on is what the run goes on from.
        directory.run_files.sync_journal(journal)
        found = _inspect_directory(directory, journal, spec)
        # After the look, which refuses what `resume` forbids: then all is left as it was.
        upkeep.clean_up(directory)
        inherit_directory_mode(directory.journal_path)
        for name in found.damaged:
            quarantine(directory.checkpoints, name)
        begun = _journal_run_start(journal, spec, found)
    except BaseException:
        journal.close()
        raise
    return OpenRun(
        spec=spec,
        run_id=found.run_id,
        directory=directory,
        journal=journal,
        state=RunState.from_events([*found.events, *begun]),
        next_attempt=found.next_attempt,
        used_budget=count_used_budget(_list_failures_since_last_end(found.events)),
        warning=_append_config_changes(found.warning, found.run_starts, spec.config_record),
    )


@dataclass(frozen=True)
class _ExistingRun:
    """What a start finds in a run's directory, and goes on from.

    Attributes:
        events: What has happened.
        intact: The checkpoints that are whole, oldest first.
        damaged: The names of newer ones, which are not, or are gone.
        warning: How it goes on, if that is not a matter of course.
        lost: Reports that the journal lacks; None if it was not truncated.
    """

    events: list[JournaledEvent]
    intact: list[Manifest]
    damaged: Collection[str]
    warning: str
    lost: ReportsLost | None

    @property
    def run_starts(self) -> list[RunStarted]:
        return [event for event in self.events if isinstance(event, RunStarted)]

    @cached_property
    def run_id(self) -> str:
        known = [event.run_id for event in self.run_starts]
        known += [each.run_id for each in reversed(self.intact)]  # the journal may be lost
        return next(filter(None, known), uuid.uuid4().hex)

    @property
    def next_attempt(self) -> int:
        attempts = [event.attempt for event in self.events if isinstance(event, AttemptStarted)]
        # Also without a journal no number may come twice: orders are told apart by it.
        attempts += [each.attempt for each in self.intact]
        return max(attempts, default=-1) + 1


def _inspect_directory(directory: RunDirectory, journal: Journal, spec: RunSpec) -> _ExistingRun:
    """Read the run directory and decide how to resume from it."""
    checkpoints = directory.checkpoints
    state, events, damage = _classify_directory(directory, journal)
    found, altered = split_damaged(checkpoints, checkpoints.list_committed())
    intact = [each for each in found if checkpoints.is_intact(each.name)]
    if altered:
        others = [part for part in damage if part not in altered]
        state, damage = RunDirectoryState.DAMAGED, [*others, *altered.values()]
    lost = missing_reports(events, intact) if events else None
    if lost is not None:
        state = RunDirectoryState.DAMAGED
        damage.append(
            f"its journal, which lacks reports {lost.first} to {lost.until - 1} that were made "
            f"before {lost.checkpoint}"
        )
    newest = intact[-1].name if intact else None
    plan = decide_resume(
        state,
        spec.run_config.resume,
        path=directory.uri,
        latest=newest,
        damage=damage,
        conflict=_conflicting_functions(events, spec.function),
    )
    missing = _missing_checkpoints(events, intact)
    return _ExistingRun(events, intact, {*altered, *missing}, plan.warning, lost)


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
    return (
        RunState.from_events(events).status == "finished"
    )  # deletions by `drawbar clean` may follow


def _missing_checkpoints(events: list[JournaledEvent], intact: list[Manifest]) -> list[str]:
    """List checkpoints that were committed after the newest intact one: their files are lost."""
    newest = intact[-1].index if intact else -1
    return [name for name, index in kept_indices(events).items() if index > newest]


def _journal_run_start(
    journal: Journal, spec: RunSpec, found: _ExistingRun
) -> list[JournaledEvent]:
    """Journal the start, and the differences between the run directory and the journal."""
    now = time.time()
    started = RunStarted(
        time=now,
        run_id=found.run_id,
        name=spec.name,
        config=spec.config_record,
        detached=spec.run_config.detached,
        function=spec.function,
    )
    deleted = [CheckpointDeleted(time=now, name=name) for name in found.damaged]
    lost = [] if found.lost is None else [found.lost]
    begun: list[JournaledEvent] = [started, *lost, *deleted, *_find_unjournaled_commits(found)]
    for event in begun:
        journal.append(event)
    return begun


def _find_unjournaled_commits(found: _ExistingRun) -> list[CheckpointCommitted]:
    """Return the checkpoints that are newer than the journal.

    There is one if a driver was killed between a commit and its journal entry, and there may be
    several if the journal was truncated.
    """
    indices = [event.index for event in found.events if isinstance(event, CheckpointCommitted)]
    # By the report and not by the name, which may have been given anew.
    newest = max(indices, default=-1)
    left = [each for each in found.intact if each.index > newest]
    return [CheckpointCommitted.of(manifest, seconds=0.0) for manifest in left]


def _append_config_changes(
    warning: str, starts: list[RunStarted], settings: dict[str, object]
) -> str:
    changed = list_config_changes(starts[-1].config, settings) if starts else []
    if not changed:
        return warning
    listed = "changed since the run's last start: " + "; ".join(changed)
    return f"{warning}; {listed}" if warning else listed


def _list_failures_since_last_end(events: list[JournaledEvent]) -> list[AttemptEndCause]:
    """Give how attempts failed since the run last ended: a dead driver leaves them to the next."""
    ends: list[AttemptEndCause] = []
    for event in events:
        if isinstance(event, RunEnded):
            ends = []
        elif isinstance(event, AttemptEnded):
            ends.append(event.cause)
    return ends


def _classify_directory(
    directory: RunDirectory, journal: Journal
) -> tuple[RunDirectoryState, list[JournaledEvent], list[str]]:
    """Return the state of the directory, its events, and a description of each damaged part."""
    events, whole = journal.recover()
    damage = [] if whole else ["its journal, whose unreadable lines are now in journal.damaged"]
    damage += directory.checkpoints.list_damaged()
    if not events and whole:
        if not directory.checkpoints.list_committed() and not damage:
            return RunDirectoryState.NONE, events, damage
        damage.insert(0, "its journal, which is empty or gone, so that its history begins anew")
    if damage:
        return RunDirectoryState.DAMAGED, events, damage
    state = RunDirectoryState.FINISHED if _has_finished(events) else RunDirectoryState.UNFINISHED
    return state, events, damage
