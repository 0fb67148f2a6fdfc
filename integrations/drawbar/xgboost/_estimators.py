"""scikit-learn estimators that train XGBoost on Ray workers."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
from xgboost import Booster, XGBClassifier, XGBModel, XGBRanker, XGBRegressor

from drawbar._boosting.estimators import (
    RayEstimator,
    add_drawbar_parameters,
    drop_drawbar_parameters,
)
from drawbar._boosting.progress import BoostingProgress
from drawbar._boosting.user_data import (
    ColumnData,
    FeatureData,
    UserData,
    fill_missing_columns,
    has_feature_names,
    is_ray_dataset,
    unique_labels,
)
from drawbar.train import Checkpoint
from drawbar.xgboost._compat import (
    configure_fit,
    set_fitted_attributes,
    split_qid,
    wrap_objective,
)
from drawbar.xgboost._predict import predict_with_estimator
from drawbar.xgboost._report_callback import RayTrainReportCallback
from drawbar.xgboost._trainer import XGBoostTrainer

if TYPE_CHECKING:
    import numpy.typing as npt

InitialModel: TypeAlias = Booster | XGBModel | str
"""Model to continue from; a str is a path."""


class _RayXGBModel(RayEstimator):
    """Mixin that trains on workers. Place it before XGBoost's estimator."""

    objective: Any  # this and the following attributes belong to XGBoost's estimator
    missing: Any
    feature_types: Any
    early_stopping_rounds: Any
    callbacks: Any

    _builtin_objective = "reg:squarederror"
    """Name of the objective that XGBoost gets in addition to a custom objective function.

    It determines how scores become predictions.
    """

    def get_xgb_params(self) -> dict[str, object]:
        """Return the parameters for XGBoost."""
        return drop_drawbar_parameters(super().get_xgb_params())  # type: ignore[misc]  # XGBModel's

    def fit(
        self,
        X: FeatureData,
        y: ColumnData,
        *,
        sample_weight: ColumnData = None,
        base_margin: ColumnData = None,
        eval_set: Sequence[tuple[FeatureData, ColumnData]] | None = None,
        verbose: bool | int | None = True,
        xgb_model: InitialModel | None = None,
        sample_weight_eval_set: Sequence[ColumnData] | None = None,
        base_margin_eval_set: Sequence[ColumnData] | None = None,
        feature_weights: object = None,
    ) -> Self:
        """Fit like the base class, on workers.

        `verbose` has no effect. Use `run_config` to configure the output.
        """
        training = self._make_data(X, y, weight=sample_weight, margin=base_margin)
        evaluated = [
            self._make_data(
                features,
                label,
                weight=_get_item(sample_weight_eval_set, number),
                margin=_get_item(base_margin_eval_set, number),
            )
            for number, (features, label) in enumerate(eval_set or ())
        ]
        return self._train([training, *evaluated], xgb_model, feature_weights)

    def _train(
        self, rows: Sequence[UserData], model: InitialModel | None, feature_weights: object
    ) -> Self:
        """Train and set the attributes that XGBoost's estimator sets after training."""
        model, metric, params, weights = configure_fit(self, model, self._params(), feature_weights)
        if weights is not None:
            params["feature_weights"] = np.asarray(weights, dtype=np.float32).tolist()
        training = rows[0].features
        has_names = is_ray_dataset(training) or has_feature_names(training)
        has_types = isinstance(self.feature_types, Sequence)
        names = rows[0].feature_names("f") if has_types or not is_ray_dataset(training) else []
        categorical = _categorical_features(names, self.feature_types) if has_types else []
        rows = fill_missing_columns(
            [self._validate_labels(data) for data in rows], no_margin=math.nan
        )
        validation = {f"validation_{number}": data for number, data in enumerate(rows[1:])}
        datasets = {"train": rows[0], **validation}
        objective = self.objective
        with self._trainer_configs() as configs, tempfile.TemporaryDirectory() as directory:
            result = XGBoostTrainer(
                params=params,
                datasets={
                    name: data.to_dataset(names, by_name=has_names)
                    for name, data in datasets.items()
                },
                categorical_features=categorical or None,
                num_boost_round=self.get_num_boosting_rounds(),  # type: ignore[attr-defined]  # XGBModel's
                early_stopping_rounds=self.early_stopping_rounds,
                callbacks=[RayTrainReportCallback(), *(self.callbacks or ())],
                obj=wrap_objective(objective) if callable(objective) else None,
                custom_metric=metric,
                resume_from_checkpoint=_initial_checkpoint(model, Path(directory)),
                **rows[0].role_arguments(),
                **configs,
            ).fit()
            assert result.checkpoint is not None
            booster = XGBoostTrainer.get_model(result.checkpoint)
            progress = BoostingProgress.load(result.checkpoint) or BoostingProgress()
        if not has_names:
            booster.feature_names = None
            booster.feature_types = self.feature_types if categorical else None
        history = {name: values for name, values in progress.history.items() if name != "train"}
        set_fitted_attributes(self, booster, history)
        return self

    def _params(self) -> dict[str, object]:
        params = {name: value for name, value in self.get_xgb_params().items() if value is not None}
        if "n_jobs" in params:
            params["nthread"] = params.pop("n_jobs")
        if callable(self.objective):
            params["objective"] = self._builtin_objective
        return params

    def _make_data(self, features: FeatureData, label: ColumnData, **others: Any) -> UserData:
        return UserData(
            features=features,
            label=label,
            missing=self.missing,
            sparse_fill_value=math.nan,
            **others,
        )

    def _validate_labels(self, rows: UserData) -> UserData:
        """Check labels like XGBoost does when it creates a matrix."""
        if is_ray_dataset(rows.features):
            return rows
        label = np.asarray(rows.label, dtype=np.float64)
        if not np.isfinite(label).all():
            raise ValueError("Label contains NaN, infinity or a value too large.")
        return rows

    def predict(self, X: FeatureData, **options: object) -> Any:
        """Predict like the base class.

        For a Ray Dataset, return a dataset with an additional column `prediction`.
        """
        if not is_ray_dataset(X):
            return super().predict(X, **options)  # type: ignore[misc]  # XGBModel's
        return predict_with_estimator(self, "predict", X, options)


@add_drawbar_parameters
class RayXGBRegressor(_RayXGBModel, XGBRegressor):
    """`xgboost.XGBRegressor` that trains on Ray workers.

    Args:
        objective: See `xgboost.XGBRegressor`.
        scaling_config: Number of workers and their resources. Default: one worker.
        run_config: Run configuration: storage, restarts, output. Default: a temporary directory.
        kwargs: See `xgboost.XGBRegressor`.

    Example:
        ```python
        model = RayXGBRegressor(n_estimators=100, scaling_config=ScalingConfig(num_workers=4))
        predictions = model.fit(X, y).predict(X)
        ```
    """


@add_drawbar_parameters
class RayXGBClassifier(_RayXGBModel, XGBClassifier):
    """`xgboost.XGBClassifier` that trains on Ray workers. Labels must be 0, 1, 2, ...

    Args:
        objective: See `xgboost.XGBClassifier`.
        scaling_config: Number of workers and their resources. Default: one worker.
        run_config: Run configuration: storage, restarts, output. Default: a temporary directory.
        kwargs: See `xgboost.XGBClassifier`.

    Example:
        ```python
        model = RayXGBClassifier(n_estimators=100, scaling_config=ScalingConfig(num_workers=4))
        probabilities = model.fit(X, y).predict_proba(X)
        ```
    """

    _builtin_objective = "binary:logistic"

    def _params(self) -> dict[str, object]:
        params = super()._params()
        if self.n_classes_ > 2:
            if params.get("objective") != "multi:softmax":
                params["objective"] = "multi:softprob"
            params["num_class"] = self.n_classes_
        return params

    def _train(
        self, rows: Sequence[UserData], model: InitialModel | None, feature_weights: object
    ) -> Self:
        training = rows[0]
        labels = (
            unique_labels(training.features, training.label)
            if is_ray_dataset(training.features)
            else np.unique(np.asarray(training.label))
        )
        self.n_classes_ = len(labels)
        expected = np.arange(len(labels))
        if labels.tolist() != expected.tolist():
            raise ValueError(
                f"Invalid classes inferred from unique values of `y`.  Expected: {expected}, "
                f"got {labels}"
            )
        super()._train(rows, model, feature_weights)
        if not callable(self.objective):
            self.objective = self._params()["objective"]
        return self

    def predict_proba(self, X: FeatureData, *args: Any, **options: Any) -> Any:
        """Predict probabilities like the base class.

        For a Ray Dataset, return a dataset with an additional column `prediction`.
        """
        if not is_ray_dataset(X):
            return super().predict_proba(X, *args, **options)
        return predict_with_estimator(self, "predict_proba", X, options)


@add_drawbar_parameters
class RayXGBRanker(_RayXGBModel, XGBRanker):
    """`xgboost.XGBRanker` that trains on Ray workers. All rows of a query go to one worker.

    Args:
        objective: See `xgboost.XGBRanker`.
        scaling_config: Number of workers and their resources. Default: one worker.
        run_config: Run configuration: storage, restarts, output. Default: a temporary directory.
        kwargs: See `xgboost.XGBRanker`.

    Example:
        ```python
        model = RayXGBRanker(objective="rank:ndcg", scaling_config=ScalingConfig(num_workers=4))
        scores = model.fit(X, y, qid=qid).predict(X)
        ```
    """

    def fit(
        self,
        X: FeatureData,
        y: ColumnData,
        *,
        group: ColumnData = None,
        qid: ColumnData = None,
        sample_weight: ColumnData = None,
        base_margin: ColumnData = None,
        eval_set: Sequence[tuple[FeatureData, ColumnData]] | None = None,
        eval_group: Sequence[ColumnData] | None = None,
        eval_qid: Sequence[ColumnData] | None = None,
        verbose: bool | int | None = False,
        xgb_model: InitialModel | None = None,
        sample_weight_eval_set: Sequence[ColumnData] | None = None,
        base_margin_eval_set: Sequence[ColumnData] | None = None,
        feature_weights: object = None,
    ) -> Self:
        """Fit like `XGBRanker.fit`, on workers. With a Ray Dataset, `qid` is a column name."""
        training = self._make_ranking_data(X, y, group, qid, sample_weight, base_margin)
        evaluated = [
            self._make_ranking_data(
                features,
                label,
                _get_item(eval_group, number),
                _get_item(eval_qid, number),
                _get_item(sample_weight_eval_set, number),
                _get_item(base_margin_eval_set, number),
            )
            for number, (features, label) in enumerate(eval_set or ())
        ]
        return self._train([training, *evaluated], xgb_model, feature_weights)

    def _make_ranking_data(
        self,
        X: FeatureData,
        y: ColumnData,
        group: ColumnData,
        qid: ColumnData,
        weight: ColumnData,
        margin: ColumnData,
    ) -> UserData:
        """Return the data for training or evaluation, including the query of each row.

        For arrays, `weight` has one value per query, as in XGBoost. The returned data has this
        value in each row of the query.
        """
        if not is_ray_dataset(X):
            X, qid = split_qid(X, qid)
        if group is None and qid is None:
            raise ValueError(
                "Ranking needs the query of each row. Pass group or qid, and for eval_set "
                "eval_group or eval_qid."
            )
        if is_ray_dataset(X):
            return self._make_data(X, y, weight=weight, group=qid, margin=margin)
        sizes = _group_sizes(qid) if group is None else np.asarray(group)
        weight = None if weight is None else np.repeat(np.asarray(weight), sizes)
        return self._make_data(X, y, weight=weight, group=sizes, margin=margin)


def _group_sizes(qid: ColumnData) -> npt.NDArray[np.int64]:
    values = np.asarray(qid)
    if (values[1:] < values[:-1]).any():
        raise ValueError("qid must be in ascending order. Sort the rows by it.")
    return np.unique(values, return_counts=True)[1]


def _categorical_features(names: Sequence[str], types: Sequence[str]) -> list[str]:
    """Return the features that are categorical according to an estimator's `feature_types`."""
    return [name for name, kind in zip(names, types, strict=True) if kind == "c"]


def _initial_checkpoint(model: InitialModel | None, directory: Path) -> Checkpoint | None:
    """Save an initial model as a checkpoint. Its rounds do not count as completed."""
    if model is None:
        return None
    if isinstance(model, XGBModel):
        model = model.get_booster()
    booster = model if isinstance(model, Booster) else Booster(model_file=model)
    booster.save_model(directory / RayTrainReportCallback.CHECKPOINT_NAME)
    BoostingProgress().save(directory)
    return Checkpoint(directory)


def _get_item(values: Sequence[object] | None, number: int) -> object:
    return None if values is None else values[number]
