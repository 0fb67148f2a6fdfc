"""Distributed prediction: a booster over a Ray Dataset, batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pandas as pd
    from ray.data import Dataset

Predictor = Callable[[object], Any]
"""Gives the predictions for a pandas table of features."""


def predict_dataset(
    dataset: Dataset,
    make_predictor: Callable[[], Predictor],
    *,
    features: Sequence[str],
    keep_columns: Sequence[str] | None,
    output_column: str,
    **options: Any,
) -> Dataset:
    """Add predictions to a dataset. Lazy, as Ray Data is.

    Args:
        dataset: Rows with the features among their columns.
        make_predictor: Called once in each process that predicts; what it holds is pickled once.
        features: The columns to predict from, in the model's order.
        keep_columns: Columns to keep beside the prediction; None for all.
        output_column: Name of the prediction: a number, or a list of one for each class.
        options: Of `Dataset.map_batches`, such as `batch_size`, `compute` and `num_gpus`.
            Default of `compute`: a pool of 1 to 8 actors.

    Raises:
        ValueError: The dataset lacks a feature.
    """
    columns = dataset.columns() or []
    missing = [name for name in features if name not in columns]
    if missing:
        raise ValueError(
            f"the model's features {missing} are not in the dataset, which has {columns}"
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
    """Loads the model once, predicts many batches."""

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
        predicted = np.asarray(self._predict(batch[self._features]))
        kept = batch if self._keep_columns is None else batch[list(self._keep_columns)]
        values = predicted if predicted.ndim == 1 else list(predicted)
        return kept.assign(**{self._output: values})
