"""What the doctor finds: how it stands with one thing, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CheckStatus = Literal["ok", "warning", "problem"]


@dataclass(frozen=True)
class CheckResult:
    """One thing that was looked at.

    Attributes:
        state: A "problem" keeps runs from working; a "warning" may.
        subject: What was looked at.
        found: How it is.
        advice: What to do; "" if nothing.
        node: The host name of the machine; "" if it concerns all.
    """

    status: CheckStatus
    subject: str
    value: str
    advice: str = ""
    node: str = ""
