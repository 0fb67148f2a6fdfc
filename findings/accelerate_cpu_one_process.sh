#!/usr/bin/env bash
# Library: accelerate 1.15.0 with torch 2.13.0, on a machine without GPUs.
# Guess: `accelerate launch --num_processes 4 script.py` starts four processes, as torchrun does, or
#   prints that it cannot.
# Behaviour: it starts one process, with exit code 0. The messages name other options, whose defaults
#   are used, but not the number of processes.
# Output:
#   processes: 1
#   messages about the number of processes: 0
# Why it matters: a script that is tested on a laptop or a CI machine never runs its distributed
#   code, and the test passes.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "accelerate==1.15.0" "torch==2.13.0"
cd "$folder"
echo 'import os; print("started as rank", os.environ.get("RANK"))' > script.py
CUDA_VISIBLE_DEVICES= HF_HOME="$folder/hf" \
    venv/bin/accelerate launch --num_processes 4 script.py > output 2> messages
processes=$(grep -c "started as rank" output)
about_count=$(grep -c "num_processes" messages || true)
echo "processes: $processes"
echo "messages about the number of processes: $about_count"
[ "$processes" = 1 ] && [ "$about_count" = 0 ]
