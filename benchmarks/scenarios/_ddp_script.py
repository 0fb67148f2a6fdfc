"""torchrun's side of `ddp_steps`: `torchrun -m benchmarks.scenarios._ddp_script ANSWER_FILE`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from benchmarks.scenarios.ddp_steps import mlp, train


def main(answer: Path) -> None:
    """Train; rank 0 writes its samples."""
    dist.init_process_group("gloo")
    samples = train(DistributedDataParallel(mlp()))
    if dist.get_rank() == 0:
        answer.write_text(json.dumps(samples))
    dist.barrier()  # gloo may abort a process whose peer closes its connections first
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
