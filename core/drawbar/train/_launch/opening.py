"""From a checked configuration to a run that can start: its directory held, Ray connected."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from drawbar.train._controller.decisions import Spent, spent_so_far
from drawbar.train._history.events import (
    AttemptEnd,
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointDeleted,
    JournaledEvent,
    RunEnded,
    RunStarted,
)
from drawbar.train._history.journal import Journal
from drawbar.train._history.timeline import Snapshot
from drawbar.train._launch.preflight import check_storage_path
from drawbar.train._launch.resume import RunState, changes, resume_plan
from drawbar.train._settings.run_config import DEFAULT_STORAGE_PATH, RunConfig
from drawbar.train._storage.files import take_mode_of_folder
from drawbar.train._storage.manifest import Manifest
from drawbar.train._storage.remote_folder import locate
from drawbar.train._storage.run_directory import RunDirectory, directory_at
from drawbar.train._storage.starting_point import pass_over_damaged, set_aside


@dataclass(frozen=True)
class OpenRun:
    """A run directory that this process holds, ready for the next attempt."""

    name: str
    run_id: str
    directory: RunDirectory
    journal: Journal
    first_attempt: int
    warning: str
    spent: Spent
    snapshot: Snapshot


def directory_of(config: RunConfig) -> RunDirectory:
    """Give the directory that a run is to have. Its config has a name.

    Raises:
        ImportError, ValueError, TypeError: `storage_path` and `storage_filesystem` name no storage.
    """
    storage = locate(config.storage_path or DEFAULT_STORAGE_PATH, config.storage_filesystem)
    assert config.name is not None  # the trainer has given it one
    return directory_at(storage / config.name)


def new_name() -> str:
    """Make a name for a run that was given none."""
    return f"drawbar_{time.strftime('%Y-%m-%d_%H-%M-%S')}_{secrets.token_hex(3)}"


def open_run(directory: RunDirectory, config: RunConfig, settings: dict[str, Any]) -> OpenRun:
    """Take hold of a run directory: look at what is there, decide how to go on, sweep leftovers.

    `settings` are journaled; what differs from the last start is named in the warning.

    Raises:
        ResumeError: What is there and `RunConfig.resume` do not go together.
        JournalLockedError: The run goes on in another process.
        OSError: The storage cannot be written.
    """
    if not directory.holds_run():  # an error leaves no trace
        resume_plan(RunState.NONE, config.resume, path=directory.location, newest=None)
    checkpoints = directory.checkpoints
    is_new = not directory.path.exists()
    check_storage_path(directory.path)
    if is_new:
        take_mode_of_folder(directory.path)
    journal = Journal(directory.journal)
    try:  # from here on nobody else writes to the run, or removes its folders
        directory.catch_up(journal)
        state, events, damage = _look(directory, journal)
        found, altered = pass_over_damaged(checkpoints, checkpoints.committed())
        intact = [each for each in found if checkpoints.is_intact(each.name)]
        if altered:
            others = [part for part in damage if part not in altered]
            state, damage = RunState.DAMAGED, [*others, *altered.values()]
        plan = resume_plan(
            state,
            config.resume,
            path=directory.location,
            newest=intact[-1].name if intact else None,
            damage=damage,
        )
        directory.sweep()
        take_mode_of_folder(directory.journal)
        for name in altered:
            set_aside(checkpoints, name)
    except BaseException:
        journal.close()
        raise
    starts = [event for event in events if isinstance(event, RunStarted)]
    run_ids = [event.run_id for event in starts] + [each.run_id for each in reversed(intact)]
    run_id = next(filter(None, run_ids), uuid.uuid4().hex)
    attempts = [event.attempt for event in events if isinstance(event, AttemptStarted)]
    attempts += [each.attempt for each in intact]  # the journal may be lost
    started = RunStarted(
        time=time.time(),
        run_id=run_id,
        name=directory.name,
        config=settings,
        detached=config.detached,
    )
    journal.append(started)
    for name in altered:
        journal.append(CheckpointDeleted(time=time.time(), name=name))
    committed = _journal_last_commit(journal, events, intact)
    return OpenRun(
        name=directory.name,
        run_id=run_id,
        directory=directory,
        journal=journal,
        first_attempt=max(attempts, default=-1) + 1,
        warning=_with_changes(plan.warning, starts, settings),
        spent=spent_so_far(_failed_since_the_end(events)),
        snapshot=Snapshot.of([*events, started, *committed]),
    )


def _journal_last_commit(
    journal: Journal, events: Sequence[JournaledEvent], intact: Sequence[Manifest]
) -> list[CheckpointCommitted]:
    """Journal the checkpoint that a driver committed in the moment in which it was killed."""
    indices = [event.index for event in events if isinstance(event, CheckpointCommitted)]
    newest = max(indices, default=-1)
    left = [each for each in intact if each.index > newest]
    committed = [CheckpointCommitted.of(manifest, seconds=0.0) for manifest in left]
    for event in committed:
        journal.append(event)
    return committed


def _with_changes(warning: str, starts: list[RunStarted], settings: dict[str, Any]) -> str:
    changed = changes(starts[-1].config, settings) if starts else []
    if not changed:
        return warning
    listed = "changed since the run's last start: " + "; ".join(changed)
    return f"{warning}; {listed}" if warning else listed


def _failed_since_the_end(events: list[JournaledEvent]) -> list[AttemptEnd]:
    """Give how attempts failed since the run last ended: a dead driver leaves them to the next."""
    ends: list[AttemptEnd] = []
    for event in events:
        if isinstance(event, RunEnded):
            ends = []
        elif isinstance(event, AttemptEnded):
            ends.append(event.kind)
    return ends


def _look(
    directory: RunDirectory, journal: Journal
) -> tuple[RunState, list[JournaledEvent], list[str]]:
    """Say what the directory holds, and name what is damaged there."""
    events, whole = journal.salvage()
    damage = [] if whole else ["its journal, whose unreadable lines are now in journal.damaged"]
    damage += directory.checkpoints.damaged()
    if not events and whole:
        if not directory.checkpoints.committed() and not damage:
            return RunState.NONE, events, damage
        damage.insert(0, "its journal, which is empty or gone, so that its history begins anew")
    if damage:
        return RunState.DAMAGED, events, damage
    ended = isinstance(events[-1], RunEnded) and events[-1].outcome == "finished"
    return (RunState.FINISHED if ended else RunState.UNFINISHED), events, damage
