#!/usr/bin/env bash
# Library: torch 2.13.0 (torch.distributed.checkpoint.state_dict).
# Guess: `get_optimizer_state_dict(model, optimizer)` reads the state and changes nothing, so a
#   checkpoint has no influence on the training.
# Behaviour: before the first step, it calls `optimizer.step()` with zero gradients and a learning
#   rate of 0 to create the state. The parameters do not change, but the step counter is 1. Adam
#   corrects its moments by this counter, so each later update differs. `optimizer.state_dict()`
#   has no such effect.
# Output (step counter after the checkpoint, and the weight after one training step):
#   no checkpoint:            counter 0, weight 0.9000
#   optimizer.state_dict():   counter 0, weight 0.9000
#   get_optimizer_state_dict: counter 1, weight 0.9256
# Why it matters: a checkpoint at step 0 tests the storage before hours of training. With it, the
#   first updates are smaller, so runs with and without this checkpoint differ.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict


def train(name, checkpoint):
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    checkpoint(model, optimizer)
    counter = int(optimizer.state[model.weight].get("step", 0))
    model(torch.ones(1)).backward()
    optimizer.step()
    weight = round(model.weight.item(), 4)
    print(f"{name:25} counter {counter}, weight {weight:.4f}")
    return counter, weight


none = train("no checkpoint:", lambda model, optimizer: None)
plain = train("optimizer.state_dict():", lambda model, optimizer: optimizer.state_dict())
changed = train("get_optimizer_state_dict:", get_optimizer_state_dict)
assert none == plain == (0, 0.9)
assert changed == (1, 0.9256)
PROGRAM
