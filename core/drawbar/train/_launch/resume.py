"""What a run directory and `RunConfig.resume` mean together. Pure: values to a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from drawbar.train._errors import ResumeError
from drawbar.train._settings.run_config import Resume
from drawbar.train._settings.secrets import HIDDEN, cleaned, looks_secret


def changes(before: Mapping[str, object], now: Mapping[str, object], prefix: str = "") -> list[str]:
    """Name what differs between two configurations, key by key: `a.b: 1 -> 2`.

    Secrets are not compared, since what they were was not written down; that one came or went is
    said, not what it is.
    """
    found = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += changes(old, new, f"{prefix}{key}.")
        # A secret that was not written down always differs, and must not be shown either way.
        elif HIDDEN in (old, new) or looks_secret(key):
            if (old is None) != (new is None):
                found.append(f"{prefix}{key}: changed")
        elif old != new:
            found.append(cleaned(f"{prefix}{key}: {old!r} -> {new!r}"))
    return found


class RunState(Enum):
    """What a run directory holds."""

    NONE = "no run"
    UNFINISHED = "an unfinished run"
    FINISHED = "a finished run"
    DAMAGED = "a run with damaged parts"


@dataclass(frozen=True)
class ResumePlan:
    """How to go on: a fresh run, or the one that is there. `warning` is for the user."""

    fresh: bool
    warning: str = ""


def resume_plan(
    state: RunState,
    resume: Resume,
    *,
    path: str,
    newest: str | None,
    damage: Sequence[str] = (),
) -> ResumePlan:
    """Decide what a run directory and `RunConfig.resume` mean together.

    no run             "auto" and "never" begin a new one; "must" is an error
    an unfinished run  "auto" goes on from its newest checkpoint, or from the start if it has none;
                       "must" needs a checkpoint; "never" is an error
    a finished run     "auto" goes on, with a warning; "never" and "must" are errors
    damaged parts      "auto" goes on from the newest intact checkpoint, with a warning; "must" the
                       same, and needs one; "never" is an error

    A journal that is empty or gone beside checkpoints is damage: they are of a run, whose numbers
    go on after theirs.

    Args:
        state: What the directory holds.
        resume: What the user wants.
        path: The directory, for messages.
        newest: Name of the newest intact checkpoint, None if there is none.
        damage: The damaged parts, for the warning.

    Raises:
        ResumeError: They do not go together; the message says what to set instead.
    """
    if state is RunState.NONE:
        if resume == "must":
            raise ResumeError(
                f'RunConfig.resume="must", but there is no run at {path}; '
                'check name and storage_path, or set resume="auto" to start one'
            )
        return ResumePlan(fresh=True)
    if resume == "never":
        raise ResumeError(
            f'RunConfig.resume="never", but {path} holds {state.value}; '
            'choose another name, delete it, or set resume="auto" to go on from it'
        )
    if resume == "must" and state is RunState.FINISHED:
        raise ResumeError(
            f'RunConfig.resume="must", but the run at {path} is finished. Its result is '
            f'Result.from_path({path!r}); to train further set resume="auto"'
        )
    if resume == "must" and newest is None:
        raise ResumeError(
            f'RunConfig.resume="must", but the run at {path} has no intact checkpoint; '
            'set resume="auto" to start it again from the beginning'
        )
    return ResumePlan(fresh=False, warning=_warning(state, path, newest, damage))


def _warning(state: RunState, path: str, newest: str | None, damage: Sequence[str]) -> str:
    start = f"checkpoint {newest}" if newest else "the beginning, since it has no checkpoint"
    if state is RunState.FINISHED:
        return (
            f"the run at {path} is FINISHED already; training goes on from {start}. "
            "A function that counts its epochs from the checkpoint may find nothing left to do. "
            'For a new run choose another RunConfig.name; resume="never" makes this an error'
        )
    if state is RunState.DAMAGED:
        named = f": {'; '.join(damage)}" if damage else ""
        return f"the run at {path} has damaged parts{named}; training goes on from {start}"
    return ""
