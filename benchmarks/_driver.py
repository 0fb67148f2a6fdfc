"""Run one scenario on one system in a separate process: `python -m benchmarks._driver NAME SIDE`.

Standard output contains exactly one line of JSON: the samples, or an error in one sentence. All
other output, including the forwarded output of workers and tracebacks, goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from typing import cast

from benchmarks._scenario import Answer, Side
from benchmarks.scenarios import SCENARIOS


def main(name: str, side: Side) -> None:
    """Run the side and print its `Answer`."""
    answer = os.dup(sys.stdout.fileno())
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    [scenario] = [scenario for scenario in SCENARIOS if scenario.name == name]
    try:
        outcome = Answer(samples=scenario.sides[side]())
    except Exception as error:
        traceback.print_exc()
        first_line = str(error).strip().partition("\n")[0]
        outcome = Answer(error=f"{type(error).__name__}: {first_line}")
    with os.fdopen(answer, "w") as stream:
        print(json.dumps(outcome), file=stream)


if __name__ == "__main__":
    main(sys.argv[1], cast(Side, sys.argv[2]))
