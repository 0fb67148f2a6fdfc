"""predict: distributed prediction with an XGBoost booster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from xgboost import Booster, DMatrix

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
        predict_options: Arguments of `Booster.predict`, such as `output_margin=True`.
        options: Arguments of `Dataset.map_batches`, such as `batch_size` and `compute`.

    Returns:
        A lazy dataset with the kept columns and the prediction.

    Raises:
        ValueError: The dataset lacks a feature, or the booster has no feature names.

    Example:
        ```python
        predictions = drawbar.xgboost.predict(booster, dataset, keep_columns=["id"])
        ```
    """
    best = booster.attr("best_iteration")
    rounds = {} if best is None else {"iteration_range": (0, int(best) + 1)}
    make = partial(
        _make_predictor, bytes(booster.save_raw()), {**rounds, **(predict_options or {})}
    )
    return predict_dataset(
        dataset,
        make,
        features=_features(booster),
        keep_columns=keep_columns,
        output_column=output_column,
        **options,
    )


def predict_with_estimator(
    estimator: Any, method: str, dataset: Dataset, options: dict[str, Any]
) -> Dataset:
    """Predict a Ray Dataset with a method of an estimator."""
    make = make_predictor_factory(estimator, method, _prepare_batch, options)
    features = _features(estimator.get_booster())
    return predict_dataset(
        dataset, make, features=features, keep_columns=None, output_column="prediction"
    )


def _features(booster: Booster) -> Sequence[str]:
    if booster.feature_names is None:
        raise ValueError(
            "The booster has no feature names, so its columns are unknown. Set "
            "booster.feature_names."
        )
    return booster.feature_names


def _make_predictor(model: bytes, options: dict[str, object]) -> Predictor:
    booster = Booster(model_file=bytearray(model))
    booster.set_param({"nthread": 1})
    return lambda features: booster.predict(_to_dmatrix(booster, features), **options)


def _to_dmatrix(booster: Booster, features: pd.DataFrame) -> DMatrix:
    """Create a matrix. Strings and numbers of categorical features become categories."""
    frame = _strings_to_categories(booster, features)
    has_codes = any(
        frame[name].dtype.name != "category" for name in _categorical_features(booster, frame)
    )
    types = booster.feature_types if has_codes else None
    return DMatrix(frame, enable_categorical=True, feature_types=types)


def _prepare_batch(estimator: Any, features: pd.DataFrame) -> pd.DataFrame:
    booster = estimator.get_booster()
    booster.set_param({"nthread": 1})
    return _strings_to_categories(booster, features)


def _strings_to_categories(booster: Booster, features: pd.DataFrame) -> pd.DataFrame:
    """Convert strings of categorical features to categories, together with integer ones.

    XGBoost accepts codes of categories only in a table without named categories.
    """
    import pandas as pd

    names = _categorical_features(booster, features)
    is_code = {name: features[name].dtype.kind in "iuf" for name in names}
    if all(is_code.values()):
        return features
    changed: dict[str, Any] = {}
    for name in names:
        column = features[name]
        if is_code[name]:
            changed[name] = pd.Categorical(column, sorted(column.dropna().astype(int).unique()))
        elif column.dtype.name != "category":
            changed[name] = column.astype("category")
    return features.assign(**changed)


def _categorical_features(booster: Booster, features: pd.DataFrame) -> list[str]:
    kinds = zip(features, booster.feature_types or (), strict=False)
    return [name for name, kind in kinds if kind == "c"]
