"""torchrun's side of a `_steps` scenario: `torchrun -m ..._steps_script MODULE ANSWER_FILE`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path

from benchmarks.scenarios._steps import train_in_one_thread


def main(module: str, answer: Path) -> None:
    """Train; rank 0 writes its samples."""
    samples = train_in_one_thread(importlib.import_module(module).train, "bare")
    if os.environ["RANK"] == "0":
        answer.write_text(json.dumps(samples))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
