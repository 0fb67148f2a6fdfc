"""`Verdict`: the cause of a failure, and what follows from it."""

from __future__ import annotations

from typing import Literal

import msgspec

from drawbar._process.batch_counter import format_place

FailureNature = Literal[
    "exception", "exit", "temporary", "crash", "out_of_memory", "full_disk",
    "network", "hardware", "killed", "preemption", "hang",
]  # fmt: skip
"""Kinds of a single failure, without knowledge of other failures."""

VerdictKind = FailureNature | Literal["deterministic", "bad_node"]
"""Cause: the nature of a failure, or a conclusion from several failures."""

_EXPLAINED_BY_ERROR = ("exception", "exit")


class FailureFingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """Kind of a failure, and its place in the code, in the data, and in the cluster.

    Attributes:
        rank: Rank of the worker; -1 if no single rank is responsible, as for a hang.
        nature: Kind of the failure.
        error: Type and message of the exception, or the signal, without numbers and addresses.
        location: Innermost line of user code as `file:line in function`, "" if it is unknown.
        report_index: Number of the rank's next report in the run.
        num_batches: Batches since the last report, as in `WorkerFailure`.
        num_reports: Number of the rank's reports in the attempt.
        seconds: Time since the rank's last report, or since the start of its function.
        world_size: Number of ranks.
        num_nodes: Number of nodes of the ranks.
        node_id: Node of the worker.
        hostname: Host of the worker.
        pid: Process ID of the worker.
        data_position: As in `WorkerFailure`.
        is_missing_file: Whether the error is about a file that does not exist or cannot be opened.
        is_code_error: Whether the type of the exception, such as TypeError, shows that the code is
            wrong, and not a service that is unavailable for a while.
        num_ranks: Number of ranks with the same error at the same line in the attempt.

    Example: `print(event.fingerprints[0].error, event.fingerprints[0].location)`
    """

    rank: int
    nature: FailureNature
    error: str
    location: str = ""
    report_index: int = 0
    num_batches: int | None = None
    num_reports: int = 0
    seconds: float = 0.0
    world_size: int = 1
    num_nodes: int = 1
    node_id: str = ""
    hostname: str = ""
    pid: int = 0
    data_position: str = ""
    is_missing_file: bool = False
    is_code_error: bool = False
    num_ranks: int = 1

    @property
    def has_data_position(self) -> bool:
        """True if the rank has received a batch or made a report in the attempt."""
        return bool(self.num_batches or self.num_reports)

    def describe_position(self) -> str:
        """Return the position in the data, such as "batch 13 after 4 reports"."""
        return format_place(self.num_batches or 0, self.report_index)


FailedAttempt = tuple[int, list[FailureFingerprint]]
"""Number of an attempt, and its failures, the root cause first."""


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """Cause of a failure, and what follows from it.

    Attributes:
        kind: Cause, as in the table of the guide's page on failures.
        reason: Cause in one phrase.
        evidence: Observations that lead to the cause, one sentence each.
        remedy: What would change the decision.
        should_stop: Whether the run must not restart.
        should_retry: Whether a later start of a stopped run may succeed.
        excluded_node: Node that the run leaves, "" if there is none.
        delay_seconds: Time to wait before the next attempt, because the cause may be temporary.
        fingerprints: Failures of the attempt, the root cause first.

    Example: `print(event.verdict.kind, event.verdict.reason)`
    """

    kind: VerdictKind
    reason: str
    evidence: list[str] = []
    remedy: str = ""
    should_stop: bool = False
    should_retry: bool = True
    excluded_node: str = ""
    delay_seconds: float = 0.0
    fingerprints: list[FailureFingerprint] = []

    def describe(self) -> str:
        """Return the reason, the evidence, and the remedy, one line each."""
        consequence = "; the next attempt leaves the node" if self.excluded_node else ""
        return "\n".join([f"{self.kind}: {self.reason}{consequence}", *self._list_details()])

    def explain_end(self, reason: str) -> str:
        """Return why the run ends, for the text "The run ends: ...", without the last period.

        Args:
            reason: Reason of the decision, for example a used budget.
        """
        if self.should_stop:
            lines = [f"{reason}.", *self._list_details()]
        elif self.kind in _EXPLAINED_BY_ERROR:
            return reason
        else:
            lines = [f"{reason}.", f"Cause: {self.reason}."]
        return "\n".join(lines).removesuffix(".")

    def _list_details(self) -> list[str]:
        return [f"  {line}" for line in [*self.evidence, self.remedy] if line]
