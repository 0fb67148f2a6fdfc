"""predict: distributed prediction with a LightGBM booster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightgbm import Booster

from drawbar._boosting.estimators import make_predictor_factory
from drawbar._boosting.predict import Predictor, predict_dataset

if TYPE_CHECKING:
    import pandas as pd
    from ray.data import Dataset


def predict(
    booster: Booster,
    dataset: Dataset,
    *,
    keep_columns: Sequence[str] | None = None,
    output_column: str = "prediction",
    predict_options: Mapping[str, object] | None = None,
    **options: object,
) -> Dataset:
    """Predict a Ray Dataset in parallel and add a prediction column.

    Args:
        booster: Trained booster. If early stopping determined a best round, later rounds are not
            used.
        dataset: Dataset that contains the booster's features, in any order.
        keep_columns: Columns to keep in addition to the prediction. Default: all.
        output_column: Name of the prediction column, which contains a number in each row, or a
            list with one number per class.
        predict_options: Arguments of `Booster.predict`, such as `raw_score=True`.
        options: Arguments of `Dataset.map_batches`, such as `batch_size` and `compute`.

    Returns:
        A lazy dataset with the kept columns and the prediction.

    Raises:
        ValueError: The dataset lacks a feature.

    Example:
        ```python
        predictions = drawbar.lightgbm.predict(booster, dataset, keep_columns=["id"])
        ```
    """
    make = partial(
        _predictor,
        booster.model_to_string(num_iteration=-1),
        booster.best_iteration,
        {"num_threads": 1, **(predict_options or {})},
    )
    return predict_dataset(
        dataset,
        make,
        features=_features(booster, dataset),
        keep_columns=keep_columns,
        output_column=output_column,
        **options,
    )


def predict_rows(estimator: Any, method: str, dataset: Dataset, options: dict[str, Any]) -> Dataset:
    """Predict a Ray Dataset with a method of an estimator."""
    make = make_predictor_factory(estimator, method, _prepare_batch, options)
    features = _features(estimator.booster_, dataset)
    return predict_dataset(
        dataset, make, features=features, keep_columns=None, output_column="prediction"
    )


def _features(booster: Booster, dataset: Dataset) -> list[str]:
    """Return the columns of a booster's features, whose names have "_" in place of spaces."""
    columns = dataset.columns() or []
    known = {**{name.replace(" ", "_"): name for name in columns}, **{n: n for n in columns}}
    return [known.get(name, name) for name in booster.feature_name()]


def _prepare_batch(estimator: Any, features: pd.DataFrame) -> pd.DataFrame:
    return _with_categories(estimator.booster_, features)


def _predictor(model: str, best_iteration: int, options: dict[str, Any]) -> Predictor:
    booster = Booster(model_str=model)
    booster.best_iteration = best_iteration
    return lambda features: booster.predict(_with_categories(booster, features), **options)


def _with_categories(booster: Booster, features: pd.DataFrame) -> pd.DataFrame:
    """Convert strings to categories, since LightGBM rejects strings."""
    import pandas as pd

    text = features.select_dtypes(include=["object", "string", "category"])
    for name, categories in zip(text, booster.pandas_categorical or (), strict=False):
        features = features.assign(**{name: pd.Categorical(features[name], categories=categories)})
    return features
