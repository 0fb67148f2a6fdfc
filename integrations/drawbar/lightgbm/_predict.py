"""Distributed prediction with a LightGBM booster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from lightgbm import Booster

from drawbar import _boosting
from drawbar._boosting import Predictor, make_predictor_factory

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
    """Predict the rows of a Ray Dataset, on as many CPUs as are free.

        predictions = drawbar.lightgbm.predict(booster, dataset, keep_columns=["id"])

    Args:
        booster: Trained; its best round is used if one was found.
        dataset: Rows with the booster's features among their columns, in any order.
        keep_columns: Columns to keep beside the prediction. Default: all.
        output_column: Name of the prediction: a number, or a list of one for each class.
        predict_options: Arguments of `Booster.predict`, such as `raw_score=True`.
        options: Arguments of `Dataset.map_batches`, such as `batch_size` and `compute`.

    Raises:
        ValueError: The dataset lacks a feature.
    """
    make = partial(
        _predictor,
        booster.model_to_string(num_iteration=-1),
        booster.best_iteration,
        {"num_threads": 1, **(predict_options or {})},
    )
    return _boosting.predict_dataset(
        dataset,
        make,
        features=_features(booster, dataset),
        keep_columns=keep_columns,
        output_column=output_column,
        **options,
    )


def predict_rows(estimator: Any, method: str, dataset: Dataset, options: dict[str, Any]) -> Dataset:
    """Predict the rows of a Ray Dataset with a method of an estimator, and options of that."""
    make = make_predictor_factory(estimator, method, _prepared, options)
    features = _features(estimator.booster_, dataset)
    return _boosting.predict_dataset(
        dataset, make, features=features, keep_columns=None, output_column="prediction"
    )


def _features(booster: Booster, dataset: Dataset) -> list[str]:
    """Give the columns that are a booster's features, in whose names a space is "_"."""
    columns = dataset.columns() or []
    known = {**{name.replace(" ", "_"): name for name in columns}, **{n: n for n in columns}}
    return [known.get(name, name) for name in booster.feature_name()]


def _prepared(estimator: Any, features: pd.DataFrame) -> pd.DataFrame:
    return _with_categories(estimator.booster_, features)


def _predictor(model: str, best_iteration: int, options: dict[str, Any]) -> Predictor:
    booster = Booster(model_str=model)
    booster.best_iteration = best_iteration
    return lambda features: booster.predict(_with_categories(booster, features), **options)


def _with_categories(booster: Booster, features: pd.DataFrame) -> pd.DataFrame:
    """Make categories of plain strings, which LightGBM takes for an error."""
    import pandas as pd

    text = features.select_dtypes(include=["object", "string", "category"])
    for name, categories in zip(text, booster.pandas_categorical or (), strict=False):
        features = features.assign(**{name: pd.Categorical(features[name], categories=categories)})
    return features
