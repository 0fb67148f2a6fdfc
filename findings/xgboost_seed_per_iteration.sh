#!/usr/bin/env bash
# Library: xgboost 3.2.0 (package xgboost-cpu).
# Guess: `seed_per_iteration=True` seeds each round by its number. A run that continues with
#   `xgb_model` after 2 rounds then draws the same rows as a run without an interruption.
# Behaviour: `xgb.train` counts rounds from 0 again, although the model has 2 rounds. The new trees
#   are trained on the same random rows as the first trees. A model that is continued in steps of
#   one round trains all trees on the same half of the rows.
# Output (sampled rows of each tree):
#   4 rounds:            [978, 1018, 987, 989]
#   2 rounds + 2 rounds: [978, 1018, 978, 1018]
#   1 + 1 + 1 + 1:       [978, 978, 978, 978]
# Why it matters: a run that is restarted from checkpoints looks reproducible, but samples fewer
#   different rows. `subsample` then no longer prevents overfitting.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "xgboost-cpu==3.2.0" "numpy==2.4.6"
cd "$folder"
venv/bin/python - <<'PROGRAM'
import json

import numpy as np
import xgboost

rng = np.random.default_rng(0)
features = rng.normal(size=(2000, 2))
data = xgboost.DMatrix(features, label=features[:, 0])
params = {"subsample": 0.5, "max_depth": 1, "seed_per_iteration": True, "nthread": 1}


def train(name, rounds):
    model = None
    for count in rounds:
        model = xgboost.train(params, data, count, xgb_model=model)
    trees = model.get_dump(with_stats=True, dump_format="json")
    rows = [int(json.loads(tree)["cover"]) for tree in trees]
    print(f"{name:20} {rows}")
    return rows


full = train("4 rounds:", [4])
halves = train("2 rounds + 2 rounds:", [2, 2])
singles = train("1 + 1 + 1 + 1:", [1, 1, 1, 1])
assert len(set(full)) > 2
assert halves == full[:2] * 2
assert singles == full[:1] * 4
PROGRAM
