"""Result of one check."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

CheckStatus = Literal["ok", "warning", "error"]


@dataclass(frozen=True)
class CheckResult:
    """Result of one check.

    Attributes:
        status: An "error" prevents runs from working; a "warning" may.
        subject: Checked item, for example "GPUs".
        value: Measured value or state.
        advice: How to fix it; "" if there is nothing to fix.
        node: Host name of the machine; "" if the check concerns all machines.
    """

    status: CheckStatus
    subject: str
    value: str
    advice: str = ""
    node: str = ""
