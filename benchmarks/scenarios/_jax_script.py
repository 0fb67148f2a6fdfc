"""Plain JAX's side of `jax_steps`: one process of it, by ADDRESS ANSWER_FILE RANK."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import jax

from benchmarks.scenarios.jax_steps import WORKERS, train


def main(address: str, answer: Path, rank: int) -> None:
    """Train; rank 0 writes its samples."""
    jax.distributed.initialize(address, WORKERS, rank, cluster_detection_method="deactivate")
    samples = train()
    if rank == 0:
        answer.write_text(json.dumps(samples))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
