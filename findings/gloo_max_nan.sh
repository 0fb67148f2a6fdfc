#!/usr/bin/env bash
# Library: torch 2.13.0 (torch.distributed, backend gloo).
# Guess: `all_reduce(op=ReduceOp.MAX)` returns NaN where one rank has NaN, as `torch.maximum` does,
#   or ignores NaN everywhere, as `torch.fmax` does. All elements and ranks are treated equally.
# Behaviour: NaN is kept or lost by the index of the element and the rank that has it. Each half of
#   the tensor is reduced by another rank, which keeps NaN only if it is its own. A tensor of one
#   element keeps NaN of rank 0 and loses NaN of rank 1.
# Output (on both ranks; the other rank has its rank number in each element):
#   1 element,  NaN on rank 0: [nan]
#   1 element,  NaN on rank 1: [0.0]
#   4 elements, NaN on rank 0: [nan, nan, 1.0, 1.0]
#   4 elements, NaN on rank 1: [0.0, 0.0, nan, nan]
# Why it matters: a check for a diverged loss that reduces it with MAX notices NaN of rank 0, so it
#   passes its test. NaN of another rank becomes the finite loss of rank 0.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cd "$folder"
cat > reduce.py <<'PROGRAM'
import torch
import torch.distributed as dist
import torch.multiprocessing


def run(rank):
    store = f"file://{__file__}.store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    results = []
    for size in (1, 4):
        for nan_rank in (0, 1):
            value = torch.full((size,), float("nan") if rank == nan_rank else float(rank))
            dist.all_reduce(value, op=dist.ReduceOp.MAX)
            results.append(str(value.tolist()))
            if rank == 0:
                name = "1 element, " if size == 1 else "4 elements,"
                print(f"{name} NaN on rank {nan_rank}: {results[-1]}")
    assert results == ["[nan]", "[0.0]", "[nan, nan, 1.0, 1.0]", "[0.0, 0.0, nan, nan]"]
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(run, nprocs=2)
PROGRAM
venv/bin/python -W ignore reduce.py
