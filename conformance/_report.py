"""Results of a suite."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Outcome = Literal["passed", "failed", "skipped", "not applicable"]


@dataclass(frozen=True)
class TestResult:
    """Result of one test.

    Attributes:
        name: Name of the test in its project.
        outcome: "skipped" if the test does not run on this machine, "not applicable" if it tests
            internals of the other launcher.
        reason: Error of a failed test, or why a test is skipped or not applicable.
    """

    name: str
    outcome: Outcome
    reason: str = ""


@dataclass(frozen=True)
class Report:
    """Results of a suite.

    Attributes:
        suite: Name of the suite.
        version: The tested project and its version.
        results: Result of each test. Empty if the suite did not run.
        notice: Why the suite did not run.
    """

    suite: str
    version: str
    results: tuple[TestResult, ...] = ()
    notice: str = ""

    @property
    def has_failed(self) -> bool:
        """Whether a test has failed."""
        return any(result.outcome == "failed" for result in self.results)

    def format(self) -> str:
        """Return one line per test that has not passed, and the number of each outcome."""
        if self.notice:
            return f"{self.suite}: did not run. {self.notice}"
        lines = [
            f"{result.outcome}: {result.name}" + (f": {result.reason}" if result.reason else "")
            for result in self.results
            if result.outcome != "passed"
        ]
        counts = Counter(result.outcome for result in self.results)
        skipped = "".join(f", {n} {kind}" for kind, n in counts.items() if kind != "passed")
        total = f"{counts['passed']} of {len(self.results)} passed{skipped}"
        return "\n".join([*lines, f"{self.suite} ({self.version}): {total}"])


def read_junit(path: Path, not_applicable: Mapping[str, str]) -> tuple[TestResult, ...]:
    """Read the results that pytest has written with `--junit-xml`.

    Args:
        path: The file.
        not_applicable: Tests whose failure is expected, with the reason.
    """
    results = []
    for case in ElementTree.parse(path).iter("testcase"):
        name = case.get("name", "")
        problem = next((e for e in case if e.tag in ("failure", "error", "skipped")), None)
        reason = "" if problem is None else problem.get("message", "").partition("\n")[0]
        outcome: Outcome = "passed"
        if problem is not None:
            outcome = "skipped" if problem.tag == "skipped" else "failed"
        if outcome == "failed" and name in not_applicable:
            outcome, reason = "not applicable", not_applicable[name]
        results.append(TestResult(name, outcome, reason))
    return tuple(results)
