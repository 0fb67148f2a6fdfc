#!/usr/bin/env bash
# Library: Ray 2.60.0 with its extra `data`, and torch 2.13.0.
# Guess: `pip install "ray[data]" torch` installs all that `Dataset.iter_torch_batches` needs.
# Behaviour: it raises an ImportError that asks for pydantic. The method asks Ray Train for the
#   device, also outside of Ray Train, and Ray Train needs pydantic, which `ray[data]` does not
#   require. `iter_batches` works.
# Output:
#   iter_batches: [0, 1, 2, 3]
#   iter_torch_batches: ImportError: `ray.train.v2` requires the pydantic package, which is missing.
#   ray[data] requires pydantic: False
# Why it matters: the error appears only when the first batch is read, in an environment that was
#   installed as the documentation says. Other packages often install pydantic, which hides it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "ray[data]==2.60.0" "torch==2.13.0"
cd "$folder"
cat > script.py <<'PYTHON'
import importlib.metadata
import logging

import ray

ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
ray.data.DataContext.get_current().enable_progress_bars = False
numbers = ray.data.range(4)
print("iter_batches:", sorted(int(i) for batch in numbers.iter_batches() for i in batch["id"]))
try:
    next(iter(numbers.iter_torch_batches()))
except ImportError as error:
    print("iter_torch_batches: ImportError:", str(error).split(" Run ")[0])
requirements = importlib.metadata.requires("ray") or []
needed = [r for r in requirements if r.startswith("pydantic") and 'extra == "data"' in r]
print("ray[data] requires pydantic:", bool(needed))
PYTHON
venv/bin/python script.py 2> /dev/null | tee output
grep -q "^iter_batches: \[0, 1, 2, 3\]$" output
grep -q "^iter_torch_batches: ImportError: .ray.train.v2. requires the pydantic package" output
grep -q "^ray\[data\] requires pydantic: False$" output
