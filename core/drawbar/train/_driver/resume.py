"""What a run directory and `RunConfig.resume` mean together. Pure: values to a value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from drawbar.train._config.run_config import ResumeMode
from drawbar.train._config.secrets import REDACTED, is_secret_key, redact_text
from drawbar.train._errors import ResumeError


def list_config_changes(
    before: Mapping[str, object], now: Mapping[str, object], prefix: str = ""
) -> list[str]:
    """Name what differs between two configurations, key by key: `a.b: 1 -> 2`.

    Secrets are not compared, since what they were was not written down; that one came or went is
    said, not what it is.
    """
    found = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found += list_config_changes(old, new, f"{prefix}{key}.")
        # A secret that was not written down always differs, and must not be shown either way.
        elif REDACTED in (old, new) or is_secret_key(key):
            if (old is None) != (new is None):
                found.append(f"{prefix}{key}: changed")
        elif old != new:
            found.append(redact_text(f"{prefix}{key}: {old!r} -> {new!r}"))
    return found


class RunDirectoryState(Enum):
    """What a run directory holds."""

    NONE = "no run"
    UNFINISHED = "an unfinished run"
    FINISHED = "a finished run"
    DAMAGED = "a run with damaged parts"


@dataclass(frozen=True)
class ResumeDecision:
    """How to go on: a fresh run, or the one that is there. `warning` is for the user."""

    is_new_run: bool
    warning: str = ""


def decide_resume(
    state: RunDirectoryState,
    resume: ResumeMode,
    *,
    path: str,
    latest: str | None,
    damage: Sequence[str] = (),
    conflict: tuple[str, str] | None = None,
) -> ResumeDecision:
    """Decide how to start in a run directory.

    no run             "auto" and "never" start a new run; "must" is an error
    an unfinished run  "auto" resumes from its latest checkpoint, or starts from scratch if it has
                       none; "must" needs a checkpoint; "never" is an error
    a finished run     as an unfinished one, with a warning; "auto" with another training function
                       is an error
    damaged parts      "auto" resumes from the latest intact checkpoint, with a warning; "must" does
                       the same, and needs one; "never" is an error

    A run that has checkpoints, but an empty journal or none, is damaged. Report numbers then
    continue after the newest checkpoint.

    Args:
        state: Content of the directory.
        resume: `RunConfig.resume`.
        path: The directory, for messages.
        newest: Name of the latest intact checkpoint, None if there is none.
        damage: The damaged parts, for the warning.
        conflict: Training functions of the finished run and of this start, if they differ.

    Raises:
        ResumeError: The directory conflicts with `resume`. The message names the remedies.
    """
    if state is RunDirectoryState.NONE:
        if resume == "must":
            raise ResumeError(
                f'RunConfig.resume="must", but there is no run at {path}; '
                'check name and storage_path, or set resume="auto" to start one'
            )
        return ResumeDecision(is_new_run=True)
    if resume == "never":
        raise ResumeError(
            f'RunConfig.resume="never", but {path} holds {state.value}; '
            'choose another name, delete it, or set resume="auto" to go on from it'
        )
    if resume == "auto" and conflict is not None:
        earlier, function = conflict
        raise ResumeError(
            f"the run at {path} has finished with the training function {earlier}, but this "
            f"trainer has {function}. Set another RunConfig.name to start a new run "
            '(resume="never" rejects every name that is in use), or set resume="must" to continue '
            "the finished run with the new function"
        )
    if resume == "must" and latest is None:
        raise ResumeError(
            f'RunConfig.resume="must", but the run at {path} has no intact checkpoint; '
            'set resume="auto" to start it again from the beginning'
        )
    return ResumeDecision(is_new_run=False, warning=_make_warning(state, path, latest, damage))


def _make_warning(
    state: RunDirectoryState, path: str, newest: str | None, damage: Sequence[str]
) -> str:
    start = f"checkpoint {newest}" if newest else "the beginning, since it has no checkpoint"
    if state is RunDirectoryState.FINISHED:
        return (
            f"the run at {path} has already finished; training continues from {start}. A function "
            "that resumes its epoch number from the checkpoint may have nothing left to do. Set "
            'another RunConfig.name to start a new run; resume="never" makes this an error'
        )
    if state is RunDirectoryState.DAMAGED:
        named = f": {'; '.join(damage)}" if damage else ""
        return f"the run at {path} has damaged parts{named}; training continues from {start}"
    return ""
