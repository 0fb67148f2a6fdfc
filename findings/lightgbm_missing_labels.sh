#!/usr/bin/env bash
# Library: lightgbm 4.7.0, scikit-learn 1.9.1, pandas 3.1.1.
# Guess: a missing label is an error, as in XGBoost and scikit-learn. Which type of table has the
#   features has no influence on this.
# Behaviour: `lightgbm.Dataset` replaces NaN in labels and weights by 0, without a warning.
#   `LGBMRegressor` raises a ValueError if the features are a NumPy array, but trains if they are a
#   DataFrame. `LGBMClassifier` raises it for both.
# Output:
#   Dataset:               label [10.0, 0.0, 10.0, 10.0], weight [10.0, 0.0, 10.0, 10.0]
#   LGBMRegressor, array:  ValueError
#   LGBMRegressor, frame:  prediction 7.5
#   LGBMClassifier, frame: ValueError
# Why it matters: rows without a label, for example after a join, train a regression to predict 0.
#   The check that a test with arrays shows does not exist for the frames of the real data.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
    "lightgbm==4.7.0" "scikit-learn==1.9.1" "pandas==3.1.1" "numpy==2.4.6"
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import lightgbm
import numpy as np
import pandas as pd

features = np.arange(4.0).reshape(4, 1)
frame = pd.DataFrame(features, columns=["feature"])
values = np.array([10, np.nan, 10, 10])
dataset = lightgbm.Dataset(features, values, weight=values, params={"verbose": -1}).construct()
label, weight = dataset.get_label().tolist(), dataset.get_weight().tolist()
print(f"Dataset:               label {label}, weight {weight}")
assert label == weight == [10, 0, 10, 10]


def predict(name, model_type, features):
    model = model_type(n_estimators=1, verbose=-1)  # 4 rows: one leaf, the mean of the labels
    try:
        prediction = float(model.fit(features, values).predict(features)[0])
        result = f"prediction {prediction}"
    except ValueError as error:
        assert "NaN" in str(error)
        result = "ValueError"
    print(f"{name:22} {result}")
    return result


regressor, classifier = lightgbm.LGBMRegressor, lightgbm.LGBMClassifier
assert predict("LGBMRegressor, array:", regressor, features) == "ValueError"
assert predict("LGBMRegressor, frame:", regressor, frame) == "prediction 7.5"
assert predict("LGBMClassifier, frame:", classifier, frame) == "ValueError"
PROGRAM
