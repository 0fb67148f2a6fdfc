"""Detect labels, weights, and initial scores that LightGBM would replace without a warning."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from lightgbm import Dataset

_FIELDS = {"label": np.float32, "weight": np.float32, "init_score": np.float64}
"""Fields of a dataset with one value per row, with LightGBM's types."""


def check_values(train_set: Dataset, valid_sets: Sequence[Dataset]) -> None:
    """Check labels, weights, and initial scores.

    LightGBM replaces NaN by 0 and infinite values by 1e38 or 1e300 when it constructs a dataset.
    In a dataset that is already constructed, they cannot be found.

    Args:
        train_set: Training data.
        valid_sets: Datasets to evaluate.

    Raises:
        ValueError: A value is missing or infinite.
    """
    datasets = {"train_set": train_set}
    datasets |= {f"valid_sets[{number}]": data for number, data in enumerate(valid_sets)}
    for name, dataset in datasets.items():
        for field, dtype in _FIELDS.items():
            values = getattr(dataset, field)
            if values is None:
                continue
            with np.errstate(over="ignore"):
                array = np.asarray(values, dtype=dtype)
            count = array.size - int(np.isfinite(array).sum())
            if count:
                raise ValueError(
                    f"{count} of {array.size} values in the {field} of {name} are null, NaN, or "
                    "infinite, and LightGBM would replace them by 0 or a large number. Drop these "
                    "rows, or replace these values."
                )
