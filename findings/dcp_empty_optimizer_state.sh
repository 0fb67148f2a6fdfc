#!/usr/bin/env bash
# Library: torch 2.13.0 (torch.distributed.checkpoint).
# Guess: `dcp.load(state_dict)` restores all entries of a container in the template, or raises an
#   error if the template has fewer entries than the checkpoint.
# Behaviour: an empty or shorter list in the template is filled with all stored entries. An empty
#   dict stays empty, without an error or a warning. The state of an optimizer has both: a list
#   `param_groups` and a dict `state`, which is empty before the first step.
# Output:
#   list: [0.1, 0.2, 0.3], dict: {}
#   Adam: learning rate 0.5 (restored), entries of state: 0 of 2
# Why it matters: `dcp.load` into the `state_dict()` of a new Adam restores the learning rate, but
#   drops the moments. The run continues with a reset optimizer.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import torch
import torch.distributed.checkpoint as dcp

values = [0.1, 0.2, 0.3]
dcp.save({"list": values, "dict": {"a": 0.1, "b": 0.2}}, checkpoint_id="values")
template = {"list": [], "dict": {}}
dcp.load(template, checkpoint_id="values")
print(f"list: {template['list']}, dict: {template['dict']}")
assert template == {"list": values, "dict": {}}


def make_optimizer(lr):
    model = torch.nn.Linear(1, 1)
    return model, torch.optim.Adam(model.parameters(), lr=lr)


model, optimizer = make_optimizer(lr=0.5)
model(torch.ones(1)).backward()
optimizer.step()
dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id="optimizer")

_, new_optimizer = make_optimizer(lr=0.1)
template = {"optimizer": new_optimizer.state_dict()}
dcp.load(template, checkpoint_id="optimizer")
new_optimizer.load_state_dict(template["optimizer"])
lr, entries = new_optimizer.param_groups[0]["lr"], len(new_optimizer.state)
print(f"Adam: learning rate {lr} (restored), entries of state: {entries} of {len(optimizer.state)}")
assert (lr, entries, len(optimizer.state)) == (0.5, 0, 2)
PROGRAM
