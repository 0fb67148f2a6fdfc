"""What to do next: pure decisions from values to a value. No Ray, no files, no clock."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from drawbar.train._config.run_config import FailureConfig
from drawbar.train._history.events import AttemptEndCause

STARTUP_DELAY_SECONDS = 2.0
MAX_STARTUP_DELAY_SECONDS = 60.0


@dataclass(frozen=True)
class UsedBudget:
    """How much of each budget is used up."""

    failures: int = 0
    preemptions: int = 0
    startups: int = 0

    def add(self, cause: AttemptEndCause) -> UsedBudget:
        """Count one more attempt that ended so. A resize costs nothing."""
        match cause:
            case "worker" | "hang":
                return replace(self, failures=self.failures + 1)
            case "preemption":
                return replace(self, preemptions=self.preemptions + 1)
            case "startup":
                return replace(self, startups=self.startups + 1)
            case _:
                return self


@dataclass(frozen=True)
class Restart:
    """Start another attempt from the latest committed checkpoint.

    Attributes:
        spent: Used budgets, including this failure.
        budget: Remaining part of the budget that this failure counts in, "" if it counts in none.
        delay: Seconds to wait before the start.
    """

    used: UsedBudget
    budget: str = field(default="", compare=False)
    delay: float = 0.0


@dataclass(frozen=True)
class GiveUp:
    """The run has failed; `reason` says which budget is spent, or why none applies."""

    reason: str


def decide_after_failure(
    cause: AttemptEndCause, used: UsedBudget, config: FailureConfig
) -> Restart | GiveUp:
    """Decide whether another attempt follows a failed one.

    Permanent failures are not retried: configuration errors, diverged ranks, and a storage that
    rejects a checkpoint.
    """
    match cause:
        case "worker" | "hang":
            spent, name, limit = used.failures, "max_failures", config.max_failures
        case "preemption":
            spent, name = used.preemptions, "max_preemption_failures"
            limit = config.max_preemption_failures
        case "startup":
            spent, name, limit = used.startups, "max_startup_failures", config.max_startup_failures
        case "resize":
            return Restart(used)
        case "configuration" | "divergence" | "storage":
            return GiveUp("it would fail again in the same way")
    # -1 is no limit.
    if limit < 0 or spent < limit:
        left = "no limit" if limit < 0 else f"{limit - spent - 1} of {limit} left"
        return Restart(used.add(cause), f"{name}: {left}")
    return GiveUp(f"FailureConfig.{name}={limit} is used up")


def startup_delay(failed_starts: int) -> float:
    """Return the seconds to wait before the next start, after so many failed starts in a row.

    The delay doubles with each failed start, up to `MAX_STARTUP_DELAY_SECONDS`. What makes a start
    fail, such as a storage or a registry that does not respond, often takes longer to recover than
    the processes take to start.
    """
    if not failed_starts:
        return 0.0
    doublings = min(failed_starts - 1, 20)
    return min(STARTUP_DELAY_SECONDS * 2.0**doublings, MAX_STARTUP_DELAY_SECONDS)


def count_used_budget(ends: Iterable[AttemptEndCause]) -> UsedBudget:
    """Count the budgets used by attempts that ended so, for a run that goes on in a new driver."""
    spent = UsedBudget()
    for end in ends:
        spent = spent.add(end)
    return spent
