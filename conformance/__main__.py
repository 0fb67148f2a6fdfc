"""`python -m conformance [--only SUITE]... [--pytorch DIR]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

from conformance._accelerate import run_accelerate_tests
from conformance._report import Report
from conformance._torchrun import run_torchrun_tests

SUITES: Mapping[str, Callable[[argparse.Namespace], Report]] = MappingProxyType(
    {
        "torchrun": lambda options: run_torchrun_tests(options.pytorch),
        "accelerate": lambda options: run_accelerate_tests(),
    }
)
"""Suites by name. Each receives the options of the command line."""


def main() -> None:
    """Run the suites, and exit with 1 if a test has failed."""
    parser = argparse.ArgumentParser(prog="python -m conformance", description=__doc__)
    parser.add_argument("--only", action="append", choices=SUITES, help="run only this suite")
    parser.add_argument("--pytorch", type=Path, help="source tree of PyTorch, for torchrun's tests")
    options = parser.parse_args()
    reports = []
    for name in options.only or SUITES:
        report = SUITES[name](options)
        print(report.format(), flush=True)
        reports.append(report)
    sys.exit(any(report.has_failed for report in reports))


if __name__ == "__main__":
    main()
