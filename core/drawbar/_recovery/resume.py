"""Decide what RunConfig.resume means for the contents of a run directory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Literal

from drawbar._base.secrets import REDACTED, is_secret_key, redact_text
from drawbar._process.errors import ResumeError

ResumeMode = Literal["auto", "never", "must"]


def list_config_changes(
    before: Mapping[str, object], now: Mapping[str, object], prefix: str = ""
) -> list[str]:
    """Return the differences between two configurations, one per key: `a.b: 1 -> 2`.

    The values of secrets are not stored, so only the presence of a secret is compared.
    """
    changes = []
    for key in sorted({*before, *now}):
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes += list_config_changes(old, new, f"{prefix}{key}.")
        # A redacted secret always differs, and must not be shown in either direction.
        elif REDACTED in (old, new) or is_secret_key(key):
            if (old is None) != (new is None):
                changes.append(f"{prefix}{key}: changed")
        elif old != new:
            changes.append(redact_text(f"{prefix}{key}: {old!r} -> {new!r}"))
    return changes


class RunDirectoryState(Enum):
    """Contents of a run directory."""

    NONE = "no run"
    UNFINISHED = "an unfinished run"
    FINISHED = "a finished run"
    DAMAGED = "a run with damaged parts"


def decide_resume(
    state: RunDirectoryState,
    resume: ResumeMode,
    *,
    path: str,
    latest: str | None,
    damage: Sequence[str] = (),
    conflict: tuple[str, str] | None = None,
) -> str:
    """Decide how to start in a run directory.

    no run             "auto" and "never" start a new run; "must" is an error
    an unfinished run  "auto" resumes from its latest checkpoint, or starts from scratch if it has
                       none; "must" needs a checkpoint; "never" is an error
    a finished run     as an unfinished one, with a warning; "auto" with another training function
                       is an error
    damaged parts      "auto" resumes from the latest intact checkpoint, with a warning; "must" does
                       the same, and needs one; "never" is an error

    A run that has checkpoints, but an empty journal or none, is damaged. Report numbers then
    continue after the latest checkpoint.

    Args:
        state: Content of the directory.
        resume: `RunConfig.resume`.
        path: The directory, for messages.
        latest: Name of the latest intact checkpoint, or None.
        damage: The damaged parts, for the warning.
        conflict: Training functions of the finished run and of this start, if they differ.

    Returns:
        A warning for the user, or an empty string.

    Raises:
        ResumeError: The directory conflicts with `resume`. The message names the remedies.
    """
    if state is RunDirectoryState.NONE:
        if resume == "must":
            raise ResumeError(
                f'RunConfig.resume="must", but there is no run in {path}. '
                'Check name and storage_path, or set resume="auto" to start one'
            )
        return ""
    if resume == "never":
        raise ResumeError(
            f'RunConfig.resume="never", but {path} contains {state.value}. '
            'Choose another name, delete the run, or set resume="auto" to resume it'
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
            f'RunConfig.resume="must", but the run in {path} has no intact checkpoint. '
            'Set resume="auto" to start it from scratch'
        )
    return _make_warning(state, path, latest, damage)


def _make_warning(
    state: RunDirectoryState, path: str, latest: str | None, damage: Sequence[str]
) -> str:
    start = f"checkpoint {latest}" if latest else "the beginning, since it has no checkpoint"
    if state is RunDirectoryState.FINISHED:
        return (
            f"the run at {path} has already finished; training continues from {start}. To start a "
            'new run, choose another name for it. To get an error in this case, set resume="never"'
        )
    if state is RunDirectoryState.DAMAGED:
        details = f": {'; '.join(damage)}" if damage else ""
        return f"the run at {path} has damaged parts{details}; training continues from {start}"
    return ""
