"""Restart decisions and failure budgets. Pure functions: no Ray, no I/O, no clock."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from drawbar._records.events import AttemptEndCause
from drawbar._records.verdict import Verdict
from drawbar._storage.contents import FileEntry

STORING_S = 5.0
MIN_BYTES_PER_SECOND = 20_000_000
"""Speed at which a rank at least stores files. Slower storage does not delay a restart."""

STARTUP_DELAY_SECONDS = 2.0
MAX_STARTUP_DELAY_SECONDS = 60.0


class FailureLimits(Protocol):
    """Maximum numbers of failures, as in `FailureConfig`. -1 is no limit."""

    @property
    def max_failures(self) -> int:
        """Failures of workers."""
        ...

    @property
    def max_preemption_failures(self) -> int:
        """Losses of nodes."""
        ...

    @property
    def max_startup_failures(self) -> int:
        """Failed starts."""
        ...

    @property
    def max_rollbacks(self) -> int:
        """Rollbacks that the training function requested."""
        ...


@dataclass(frozen=True)
class Restart:
    """Start another attempt from the latest committed checkpoint.

    Attributes:
        failure_counts: Number of failures by cause, including this one.
        budget: Remaining part of the budget that this failure counts in, "" if it counts in none.
        delay: Seconds to wait before the start.
    """

    failure_counts: Counter[AttemptEndCause]
    budget: str = field(default="", compare=False)
    delay: float = 0.0


@dataclass(frozen=True)
class GiveUp:
    """Decision not to restart. `reason` names the used budget, or why no budget applies.

    `should_retry` is as in `TrainingFailedError`.
    """

    reason: str
    should_retry: bool = field(default=True, compare=False)


def decide_after_failure(
    cause: AttemptEndCause,
    failure_counts: Counter[AttemptEndCause],
    config: FailureLimits,
    verdict: Verdict | None = None,
    *,
    has_launcher: bool = False,
) -> Restart | GiveUp:
    """Decide whether another attempt follows a failed one.

    Permanent failures are not retried: configuration errors, diverged ranks, and a storage that
    rejects a checkpoint. A resize uses no budget.

    Args:
        cause: How the attempt ended.
        failure_counts: Number of failures of earlier attempts by cause.
        config: Limits of the budgets.
        verdict: What follows from the failures of the run; None if it is unknown.
        has_launcher: Whether an external launcher restarts failed ranks.
    """
    if verdict is not None and verdict.should_stop:
        return GiveUp(verdict.explain_end(verdict.reason), verdict.should_retry)
    match cause:
        case "worker" | "hang" if has_launcher:
            return GiveUp("restarts are left to your launcher (torchrun: --max-restarts)")
        case "worker" | "hang":
            count = failure_counts["worker"] + failure_counts["hang"]
            name, limit = "max_failures", config.max_failures
        case "rollback" if has_launcher:
            return GiveUp("restarts are left to your launcher (torchrun: --max-restarts)")
        case "rollback":
            count = failure_counts["rollback"]
            name, limit = "max_rollbacks", config.max_rollbacks
        case "preemption":
            count = failure_counts["preemption"]
            name, limit = "max_preemption_failures", config.max_preemption_failures
        case "startup":
            count = failure_counts["startup"]
            name, limit = "max_startup_failures", config.max_startup_failures
        case "resize":
            return Restart(failure_counts)
        case "configuration" | "divergence" | "storage":
            return GiveUp("it would fail again in the same way", should_retry=False)
    # -1 is no limit.
    if limit < 0 or count < limit:
        remaining = "no limit" if limit < 0 else f"{limit - count - 1} of {limit} left"
        delay = verdict.delay_seconds if verdict is not None else 0.0
        return Restart(failure_counts + Counter([cause]), f"{name}: {remaining}", delay)
    reason = f"FailureConfig.{name}={limit} is used up"
    if limit == 0:
        reason = f"restarts are off. FailureConfig({name}=3) allows 3"
    reason = reason if verdict is None else verdict.explain_end(reason)
    return GiveUp(reason, should_retry=cause != "rollback")


def get_storing_limit(files: Iterable[FileEntry]) -> float:
    """Return the seconds to wait after a failure until a rank has stored these files."""
    return STORING_S + sum(file.size for file in files) / MIN_BYTES_PER_SECOND


def startup_delay(failed_starts: int) -> float:
    """Return the seconds to wait before the next start, after so many failed starts in a row.

    The delay doubles with each failed start, up to `MAX_STARTUP_DELAY_SECONDS`. A storage or a
    registry that does not respond often takes longer to recover than the processes take to start.
    """
    if not failed_starts:
        return 0.0
    doublings = min(failed_starts - 1, 20)
    return min(STARTUP_DELAY_SECONDS * 2.0**doublings, MAX_STARTUP_DELAY_SECONDS)
