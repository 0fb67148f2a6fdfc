"""Distributed prediction over a Ray Dataset."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

if TYPE_CHECKING:
    import pandas as pd
    from ray.data import Dataset

_NUMBER_KINDS = ("floating", "integer", "mixed-integer-float", "decimal", "boolean", "empty")
"""Kinds of values, as inferred by pandas, that become float64."""

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
        features = _to_numpy_columns(batch[self._features])
        predictions = np.asarray(self._predict(features))
        output = batch if self._keep_columns is None else batch[list(self._keep_columns)]
        values = predictions if predictions.ndim == 1 else list(predictions)
        return output.assign(**{self._output: values})


def _to_numpy_columns(features: pd.DataFrame) -> pd.DataFrame:
    """Convert numbers that the libraries do not accept to float64, and other text to objects.

    Ray Data's tables have columns of Arrow types, and objects such as decimals.
    """
    import pandas as pd

    changed: dict[str, Any] = {}
    for name, column in features.items():
        if isinstance(getattr(column.dtype, "pyarrow_dtype", None), pa.DictionaryType):
            changed[name] = column.astype(object).astype("category")
        elif isinstance(column.dtype, pd.CategoricalDtype):
            continue
        elif pd.api.types.is_extension_array_dtype(column.dtype) or column.dtype == object:
            kind = pd.api.types.infer_dtype(column, skipna=True)
            if kind in _NUMBER_KINDS:
                changed[name] = column.astype(object).where(column.notna(), np.nan).astype(float)
            elif kind == "string":
                changed[name] = column.astype(object).where(column.notna(), None)
    return features.assign(**changed)
