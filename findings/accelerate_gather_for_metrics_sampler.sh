#!/usr/bin/env bash
# Library: accelerate 1.15.0 with torch 2.13.0.
# Guess: `gather_for_metrics` removes the samples that Accelerate added to make the last batches of
#   all processes equal. A single process has no such samples, so it returns the batch unchanged.
# Behaviour: it computes the number of samples in the last batch from the length of the dataset,
#   not from the sampler. With a sampler of 8 of 10 rows, or a BatchSampler with `drop_last=True`,
#   the last full batch of 4 rows is cut to 10 % 4 = 2 rows, also in a single process.
# Output (rows that the loader returns -> rows that gather_for_metrics returns):
#   all rows:              10 -> 10
#   SubsetRandomSampler:   8 -> 6
#   WeightedRandomSampler: 8 -> 6
#   BatchSampler:          8 -> 6
# Why it matters: a validation split by SubsetRandomSampler reports a metric that lacks some of its
#   rows. With a shuffled split, these are other rows each time, so the metric looks noisy.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "accelerate==1.15.0" "torch==2.13.0" "numpy==2.4.6"
cd "$folder"
HF_HOME="$folder/hf" venv/bin/python -W ignore - <<'PROGRAM'
import accelerate
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

accelerator = accelerate.Accelerator(cpu=True)
dataset = TensorDataset(torch.arange(10))


def count(name, **options):
    returned = gathered = 0
    for (batch,) in accelerator.prepare(DataLoader(dataset, **options)):
        returned += len(batch)
        gathered += len(accelerator.gather_for_metrics(batch))
    print(f"{name:22} {returned} -> {gathered}")
    return returned, gathered


subset = SubsetRandomSampler(range(8))
weighted = WeightedRandomSampler([1.0] * 10, num_samples=8)
batches = BatchSampler(SequentialSampler(dataset), batch_size=4, drop_last=True)
assert accelerator.num_processes == 1
assert count("all rows:", batch_size=4) == (10, 10)
assert count("SubsetRandomSampler:", batch_size=4, sampler=subset) == (8, 6)
assert count("WeightedRandomSampler:", batch_size=4, sampler=weighted) == (8, 6)
assert count("BatchSampler:", batch_sampler=batches) == (8, 6)
PROGRAM
