#!/usr/bin/env bash
# Library: lightgbm 4.7.0.
# Guess: `force_col_wise` and `force_row_wise` choose how histograms are built. They change the
#   speed and give the same model (apart from rounding).
# Behaviour: for objective "mape" with weights, they give different models. For "mape" without
#   weights and for "l1" with weights, they give the same model.
# Output (largest difference between the predictions of the two settings):
#   mape, no weights: 0.000
#   mape, weights:    1.315
#   l1, weights:      0.000
# Why it matters: without either setting, LightGBM measures both and takes the faster one. Each
#   machine of a distributed run measures separately, so the model depends on the timing.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "lightgbm==4.7.0" "numpy==2.4.6"
cd "$folder"
venv/bin/python - <<'PROGRAM'
import lightgbm
import numpy as np

rng = np.random.default_rng(0)
features = rng.normal(size=(400, 3))
labels = np.exp(features[:, 0]) + rng.random(400) + 0.5
weights = rng.integers(1, 4, 400)


def predict(objective, weights, histograms):
    params = {
        "objective": objective,
        "num_leaves": 4,
        "num_threads": 1,
        "deterministic": True,
        "verbose": -1,
        histograms: True,
    }
    data = lightgbm.Dataset(features, labels, weight=weights)
    return lightgbm.train(params, data, num_boost_round=5).predict(features)


def difference(objective, weights):
    by_column = predict(objective, weights, "force_col_wise")
    by_row = predict(objective, weights, "force_row_wise")
    return float(np.abs(by_column - by_row).max())


unweighted, weighted, l1 = (
    difference("mape", None),
    difference("mape", weights),
    difference("l1", weights),
)
print(f"mape, no weights: {unweighted:.3f}")
print(f"mape, weights:    {weighted:.3f}")
print(f"l1, weights:      {l1:.3f}")
assert max(unweighted, l1) < 1e-6
assert weighted > 0.1
PROGRAM
