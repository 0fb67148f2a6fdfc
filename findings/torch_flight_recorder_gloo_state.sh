#!/usr/bin/env bash
# Library: torch 2.13.0.
# Guess: the flight recorder is for NCCL. If it has an entry of a gloo collective, `state` says
#   whether the collective has completed, and `onlyActive=True` lists the ones that have not.
# Behaviour: it records gloo without any setting. `state` of a gloo collective stays "scheduled"
#   after it has ended, and `onlyActive=True` returns the ended ones, too. Only `retired` and
#   `last_completed_collective` of `pg_status` show that they have ended.
# Output (number, name, state, retired):
#   1 gloo:all_reduce scheduled True
#   2 gloo:all_reduce scheduled True
#   3 gloo:broadcast scheduled True
#   active: 3, last completed: 3
# Why it matters: a diagnosis of a hang that trusts `state` or `onlyActive` shows every collective of
#   a healthy rank as one in which it waits.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "numpy==2.4.6"
cd "$folder"
venv/bin/python - <<'PROGRAM'
import json

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

store = dist.HashStore()
dist.init_process_group("gloo", store=store, rank=0, world_size=1)
dist.all_reduce(torch.ones(2))
dist.all_reduce(torch.ones(2))
dist.broadcast(torch.ones(2), 0)

dump = json.loads(c10d._dump_fr_trace_json())
rows = [
    (entry["collective_seq_id"], entry["profiling_name"], entry["state"], entry["retired"])
    for entry in dump["entries"]
]
for row in rows:
    print(*row)
active = json.loads(c10d._dump_fr_trace_json(includeCollectives=True, onlyActive=True))
completed = dump["pg_status"]["0"]["last_completed_collective"]
print(f"active: {len(active['entries'])}, last completed: {completed}")
assert rows == [
    (1, "gloo:all_reduce", "scheduled", True),
    (2, "gloo:all_reduce", "scheduled", True),
    (3, "gloo:broadcast", "scheduled", True),
]
assert len(active["entries"]) == 3
assert completed == "3"
dist.destroy_process_group()
PROGRAM
