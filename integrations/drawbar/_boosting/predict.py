"""Distributed prediction over a Ray Dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from ray.data import Dataset

Predictor = Callable[[object], Any]
"""Function that returns the predictions for a pandas table of features."""


def predict_dataset(
    dataset: Dataset,
    make_predictor: Callable[[], Predictor],
    *,
    features: Sequence[str],
    keep_columns: Sequence[str] | None,
    output_column: str,
    **options: Any,
) -> Dataset:
    """Add a prediction column to a dataset. Lazy, like Ray Data.

    Args:
        dataset: Dataset that contains the features.
        make_predictor: Called once in each process that predicts. It is pickled once.
        features: Columns to predict from, in the order of the model.
        keep_columns: Columns to keep in addition to the prediction; None for all.
        output_column: Name of the prediction column, which contains a number in each row, or a
            list with one number per class.
        options: Arguments of `Dataset.map_batches`, such as `batch_size`, `compute`, and
            `num_gpus`. Default of `compute`: a pool of 1 to 8 actors.

    Returns:
        The dataset with predictions.

    Raises:
        ValueError: The dataset lacks a feature.
    """
    columns = dataset.columns() or []
    missing = [name for name in features if name not in columns]
    if missing:
        raise ValueError(
            f"The dataset lacks the model's features {missing}. Its columns are {columns}."
        )
    if not options.keys() & {"compute", "concurrency"}:
        from ray.data import ActorPoolStrategy

        options["compute"] = ActorPoolStrategy(min_size=1, max_size=8)
    return dataset.map_batches(
        _PredictionWorker,
        fn_constructor_args=(make_predictor, list(features), keep_columns, output_column),
        batch_format="pandas",
        **options,
    )


class _PredictionWorker:
    """Actor that loads the model once and predicts batches."""

    def __init__(
        self,
        make_predictor: Callable[[], Predictor],
        features: list[str],
        keep_columns: Sequence[str] | None,
        output_column: str,
    ) -> None:
        self._predict = make_predictor()
        self._features = features
        self._keep_columns = keep_columns
        self._output = output_column

    def __call__(self, batch: pd.DataFrame) -> pd.DataFrame:
        predictions = np.asarray(self._predict(batch[self._features]))
        output = batch if self._keep_columns is None else batch[list(self._keep_columns)]
        values = predictions if predictions.ndim == 1 else list(predictions)
        return output.assign(**{self._output: values})
