#!/usr/bin/env bash
# Library: torchdata 0.11.0, torch 2.13.0.
# Guess: `StatefulDataLoader` with `shuffle=True` continues with the same order of samples after
#   `load_state_dict`, in the current epoch and in the epochs after it. A separate `generator`
#   makes this more reproducible.
# Behaviour: without `generator`, all epochs are equal to those of the run without interruption.
#   With `generator`, only the current epoch is. The next epochs have another order, although the
#   new loader gets a generator with the same seed.
# Output (rows of the interrupted epoch after the checkpoint, and of the next epoch):
#   no generator: the rest of the epoch is equal: True, the next epoch is equal: True
#   generator:    the rest of the epoch is equal: True, the next epoch is equal: False
# Why it matters: the setting that users add for reproducible runs makes resumed runs differ from
#   uninterrupted ones.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "torchdata==0.11.0" "numpy==2.4.6"
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import torch
from torchdata.stateful_dataloader import StatefulDataLoader


def make_loader(has_generator):
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0) if has_generator else None
    rows = torch.arange(32)
    return StatefulDataLoader(rows, batch_size=2, shuffle=True, generator=generator)


def read(batches):
    return torch.cat(list(batches)).tolist()


def compare(name, has_generator):
    loader = make_loader(has_generator)
    epoch = iter(loader)
    next(epoch)
    state = loader.state_dict()
    rest, following = read(epoch), read(loader)

    resumed = make_loader(has_generator)
    resumed.load_state_dict(state)
    is_equal = (read(resumed) == rest, read(resumed) == following)
    print(
        f"{name:13} the rest of the epoch is equal: {is_equal[0]},",
        f"the next epoch is equal: {is_equal[1]}",
    )
    return is_equal


assert compare("no generator:", False) == (True, True)
assert compare("generator:", True) == (True, False)
PROGRAM
