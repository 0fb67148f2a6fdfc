"""Distributed prediction with an XGBoost booster."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from xgboost import Booster, DMatrix

from drawbar import boosting
from drawbar.boosting._predict import Predictor

if TYPE_CHECKING:
    from ray.data import Dataset


def predict(
    booster: Booster,
    dataset: Dataset,
    *,
    keep_columns: Sequence[str] | None = None,
    output_column: str = "prediction",
    predict_options: dict[str, Any] | None = None,
    **options: Any,
) -> Dataset:
    """Predict the rows of a Ray Dataset, on as many CPUs as are free.

        predictions = drawbar.xgboost.predict(booster, dataset, keep_columns=["id"])

    Args:
        booster: Trained; its best round is used if one was found.
        dataset: Rows with the booster's features among their columns, in any order.
        keep_columns: Columns to keep beside the prediction. Default: all.
        output_column: Name of the prediction: a number, or a list of one for each class.
        predict_options: Arguments of `Booster.predict`, such as `output_margin=True`.
        options: Arguments of `Dataset.map_batches`, such as `batch_size` and `concurrency`.

    Raises:
        ValueError: The dataset lacks a feature, or the booster does not know its features' names.
    """
    if booster.feature_names is None:
        raise ValueError(
            "the booster was trained without names of its features, so it is not known which "
            "columns they are; set booster.feature_names"
        )
    best = booster.attr("best_iteration")
    rounds = {} if best is None else {"iteration_range": (0, int(best) + 1)}
    make = partial(_predictor, bytes(booster.save_raw()), {**rounds, **(predict_options or {})})
    return boosting.predict(
        dataset,
        make,
        features=booster.feature_names,
        keep_columns=keep_columns,
        output_column=output_column,
        **options,
    )


def _predictor(model: bytes, options: dict[str, Any]) -> Predictor:
    booster = Booster(model_file=bytearray(model))
    booster.set_param({"nthread": 1})
    return lambda features: booster.predict(_matrix(booster, features), **options)


def _matrix(booster: Booster, features: Any) -> DMatrix:
    """Give a matrix; plain strings, and numbers that are categories, are made such."""
    categorical = [
        name
        for name, kind in zip(features, booster.feature_types or (), strict=False)
        if kind == "c" and features[name].dtype.name != "category"
    ]
    text = [name for name in categorical if features[name].dtype.kind not in "iuf"]
    features = features.astype(dict.fromkeys(text, "category"))
    types = booster.feature_types if len(categorical) > len(text) else None
    return DMatrix(features, enable_categorical=True, feature_types=types)
