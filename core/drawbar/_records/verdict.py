"""`Verdict`: the cause of a failure, and what follows from it."""

from __future__ import annotations

from typing import Literal

import msgspec

from drawbar._records.fingerprint import FailureFingerprint, FailureNature

VerdictKind = FailureNature | Literal["deterministic", "bad_node"]
"""Cause: the nature of a failure, or a conclusion from several failures."""

_EXPLAINED_BY_ERROR = ("exception", "exit")


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
