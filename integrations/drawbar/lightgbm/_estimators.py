"""LightGBM's scikit-learn estimators, trained on workers.

scikit-learn is imported where it is used: a worker, which imports this module too, can do without.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

from lightgbm import Booster, LGBMClassifier, LGBMModel, LGBMRanker, LGBMRegressor
from lightgbm.sklearn import _EvalFunctionWrapper

from drawbar._boosting import (
    BoostingProgress,
    ColumnData,
    EncodedDataset,
    FeatureData,
    RayEstimator,
    UserData,
    add_drawbar_parameters,
    drop_drawbar_parameters,
    feature_names,
    fill_missing_columns,
    has_feature_names,
    is_ray_dataset,
    single_output_data,
    unique_labels,
)
from drawbar.lightgbm._parameters import find_alias, get_parameter
from drawbar.lightgbm._predict import predict_rows
from drawbar.lightgbm._report_callback import RayTrainReportCallback
from drawbar.lightgbm._trainer import LightGBMTrainer
from drawbar.train import Checkpoint

InitialModel: TypeAlias = Booster | LGBMModel | str | Path
"""What to go on from; a str is a path, too."""


class _RayLGBMModel(RayEstimator, LGBMModel):
    """`LGBMModel` whose `fit` trains on workers.

    In the order of bases it stands behind the plain estimator, whose own `fit` (which numbers the
    classes) calls this one.
    """

    def _process_params(self, stage: str) -> dict[str, object]:
        params = drop_drawbar_parameters(super()._process_params(stage))
        if stage == "fit":
            threads = get_parameter(self.get_params(), "num_threads", -1)
            params["num_threads"] = max(threads, 0)  # 0: a worker's own share
        return params

    def fit(
        self,
        X: FeatureData,
        y: ColumnData,
        sample_weight: ColumnData = None,
        init_score: ColumnData = None,
        group: ColumnData = None,
        eval_set: Sequence[tuple[FeatureData, ColumnData]] | None = None,
        eval_names: Sequence[str] | None = None,
        eval_sample_weight: object = None,
        eval_class_weight: object = None,
        eval_init_score: object = None,
        eval_group: object = None,
        eval_metric: object = None,
        feature_name: object = "auto",
        categorical_feature: object = "auto",
        callbacks: Sequence[object] | None = None,
        init_model: InitialModel | None = None,
        *,
        eval_X: FeatureData = None,
        eval_y: ColumnData = None,
    ) -> Self:
        """Do what `LGBMModel.fit` does, on workers."""
        params = self._process_params("fit")
        rounds = {"early_stopping_rounds": _pop_parameter(params, "early_stopping_round")}
        custom = _add_metrics(params, eval_metric)
        original_X, (X, sample_weight) = X, self._validate_inputs(X, y, sample_weight)
        named = isinstance(X, EncodedDataset) or has_feature_names(X)
        names = self._resolve_feature_names(X, feature_name)
        training = single_output_data(
            X,
            y,
            weight=self._sample_weights(X, y, sample_weight),
            group=group,
            margin=init_score,
        )
        pairs = _eval_pairs(eval_set, eval_X, eval_y)
        datasets = _dataset_names(pairs, eval_names, (original_X, y))
        evaluated = {
            name: single_output_data(
                features,
                label,
                weight=self._eval_weights(eval_sample_weight, eval_class_weight, label, number),
                group=_each(eval_group, number),
                margin=_each(eval_init_score, number),
            )
            for number, ((name, _), (features, label)) in enumerate(
                zip(datasets, pairs, strict=True)
            )
            if name != "train"
        }
        if len(evaluated) < len(pairs):  # LightGBM has metrics of its training rows without a copy
            params["is_provide_training_metric"] = True
        rows = dict(
            zip(
                ["train", *evaluated],
                fill_missing_columns([training, *evaluated.values()]),
                strict=True,
            )
        )
        booster, progress = self._train(
            rows,
            names,
            by_name=isinstance(feature_name, str) and named,
            params=params,
            categorical_features=_categorical_names(categorical_feature, names),
            callbacks=[RayTrainReportCallback(), *(callbacks or ())],
            feval=custom or None,
            init_model=init_model,
            **rounds,
        )
        self._set_fitted_attributes(
            booster, progress, {"train": "training", **dict(datasets)}, named=named
        )
        return self

    def _resolve_feature_names(self, X: FeatureData, original_X: Any) -> list[str]:
        """Give the names of the features; a Ray Dataset has its own."""
        if isinstance(X, EncodedDataset) or is_ray_dataset(X):
            return []
        return feature_names(X, "Column_") if isinstance(original_X, str) else list(original_X)

    def _train(
        self,
        rows: dict[str, UserData],
        names: Sequence[str],
        *,
        by_name: bool,
        init_model: InitialModel | None,
        **options: Any,
    ) -> tuple[Booster, BoostingProgress]:
        datasets = {name: each.to_dataset(names, by_name=by_name) for name, each in rows.items()}
        with self._trainer_configs() as configs, tempfile.TemporaryDirectory() as folder:
            earlier, before = _initial_checkpoint(init_model, Path(folder))
            result = LightGBMTrainer(
                datasets=datasets,
                num_boost_round=before + self.n_estimators,
                resume_from_checkpoint=earlier,
                **rows["train"].role_arguments(),
                **configs,
                **options,
            ).fit()
            assert result.checkpoint is not None
            booster = RayTrainReportCallback.get_model(result.checkpoint)
            return booster, BoostingProgress.load(result.checkpoint) or BoostingProgress()

    def _set_fitted_attributes(
        self,
        booster: Booster,
        progress: BoostingProgress,
        display_names: Mapping[str, str],
        *,
        named: bool,
    ) -> None:
        """Set what plain LightGBM sets after training."""
        self._Booster = booster
        last = (
            booster.best_iteration - 1 - progress.first_recorded_round
            if booster.best_iteration > 0
            else -1
        )
        self._n_features = self.n_features_in_ = booster.num_feature()
        self._fitted_with_feature_names = named
        self._evals_result = {display_names[name]: each for name, each in progress.history.items()}
        self._best_iteration = max(booster.best_iteration, 0)
        self._best_score = {
            data: {metric: values[last] for metric, values in by_metric.items()}
            for data, by_metric in self._evals_result.items()
        }
        booster.best_score = self._best_score
        self.fitted_ = True

    def _validate_inputs(
        self, X: FeatureData, y: ColumnData, weight: ColumnData
    ) -> tuple[FeatureData, ColumnData]:
        """Check as `LGBMModel.fit` does."""
        if isinstance(X, EncodedDataset) or is_ray_dataset(X):
            return X, weight
        if hasattr(X, "columns"):
            self.n_features_in_ = len(X.columns)
            return X, weight
        from sklearn.utils.validation import _check_sample_weight, validate_data

        X, _ = validate_data(
            self, X, y, accept_sparse=True, ensure_all_finite=False, ensure_min_samples=2
        )
        return X, None if weight is None else _check_sample_weight(weight, X)

    def _sample_weights(self, X: FeatureData, y: ColumnData, weight: ColumnData) -> ColumnData:
        """Give the rows' weights, those of their classes included."""
        if self._class_weight is None:
            self._class_weight = self.class_weight
        if self._class_weight is None:
            return weight
        if isinstance(X, EncodedDataset):
            raise ValueError(
                f"class_weight={self._class_weight!r} needs the labels in memory; with a Ray "
                "Dataset, put the weights into a column and name it in sample_weight"
            )
        return _with_class_weights(weight, self._class_weight, y)

    def _eval_weights(
        self, weights: object, class_weights: object, label: ColumnData, number: int
    ) -> ColumnData:
        weight, by_class = _each(weights, number), _each(class_weights, number)
        if by_class is None:
            return weight
        if isinstance(by_class, dict) and self._class_map is not None:
            by_class = {self._class_map[name]: value for name, value in by_class.items()}
        return _with_class_weights(weight, by_class, label)

    def predict(self, X: FeatureData, *args: Any, **options: Any) -> Any:
        """Do what the plain estimator does; a Ray Dataset gets a column `prediction`."""
        if not is_ray_dataset(X):
            return super().predict(X, *args, **options)
        return predict_rows(self, "predict", X, options)


@add_drawbar_parameters
class RayLGBMRegressor(LGBMRegressor, _RayLGBMModel):  # type: ignore[misc]  # two fits
    """`lightgbm.LGBMRegressor`, trained on workers."""


@add_drawbar_parameters
class RayLGBMRanker(LGBMRanker, _RayLGBMModel):  # type: ignore[misc]  # two fits
    """`lightgbm.LGBMRanker`, trained on workers. The rows of a query go to one of them."""


@add_drawbar_parameters
class RayLGBMClassifier(LGBMClassifier, _RayLGBMModel):
    """`lightgbm.LGBMClassifier`, trained on workers."""

    def fit(self, X: FeatureData, y: ColumnData, *args: Any, **options: Any) -> Self:
        """Do what `LGBMClassifier.fit` does, on workers."""
        if is_ray_dataset(X):
            classes = unique_labels(X, y)
            sets = [
                (EncodedDataset(*each, classes), classes)
                for each in _as_list(options.get("eval_set"))
            ]
            options["eval_set"] = sets or None
            X, y = EncodedDataset(X, y, classes), classes
        super().fit(X, y, *args, **options)
        return self

    def predict(self, X: FeatureData, *args: Any, **options: Any) -> Any:
        """Do what the plain estimator does; a Ray Dataset gets a column `prediction`."""
        if not is_ray_dataset(X):
            return super().predict(X, *args, **options)
        return predict_rows(self, "predict", X, options)

    def predict_proba(self, X: FeatureData, *args: Any, **options: Any) -> Any:
        """Do what the plain estimator does; a Ray Dataset gets a column `prediction`."""
        if not is_ray_dataset(X):
            return super().predict_proba(X, *args, **options)
        return predict_rows(self, "predict_proba", X, options)


def _initial_checkpoint(model: InitialModel | None, folder: Path) -> tuple[Checkpoint | None, int]:
    """Give what to go on from as a checkpoint, and its number of rounds."""
    if model is None:
        return None, 0
    if isinstance(model, LGBMModel):
        model = model.booster_
    booster = model if isinstance(model, Booster) else Booster(model_file=model)
    booster.save_model(folder / RayTrainReportCallback.CHECKPOINT_NAME, num_iteration=-1)
    return Checkpoint(folder), booster.current_iteration()


def _pop_parameter(params: dict[str, object], name: str) -> object:
    found = find_alias(params, name)
    return params.pop(found) if found else None


def _add_metrics(params: dict[str, object], original_X: object) -> list[object]:
    """Put the metrics of `fit` before the objective's own; gives the custom ones."""
    metrics = (
        original_X if isinstance(original_X, list) else [] if original_X is None else [original_X]
    )
    own = params["metric"] if isinstance(params["metric"], list) else [params["metric"]]
    built_in = [each for each in metrics if isinstance(each, str) and each not in own]
    params["metric"] = [*built_in, *(each for each in own if each is not None)]
    return [_EvalFunctionWrapper(each) for each in metrics if callable(each)]


def _with_class_weights(weight: ColumnData, by_class: object, label: ColumnData) -> ColumnData:
    from sklearn.utils.class_weight import compute_sample_weight

    by_row = compute_sample_weight(by_class, label)
    return by_row if weight is None else by_row * weight


def _as_list(eval_set: Any) -> list[tuple[FeatureData, ColumnData]]:
    return [eval_set] if isinstance(eval_set, tuple) else list(eval_set or ())


def _eval_pairs(
    eval_set: object, eval_X: FeatureData, eval_y: ColumnData
) -> list[tuple[FeatureData, ColumnData]]:
    """Give features and labels to evaluate, in whichever of two ways they were given."""
    if eval_set is not None or eval_X is None:
        return _as_list(eval_set)
    if isinstance(eval_X, tuple):
        return list(zip(eval_X, eval_y, strict=True))
    return [(eval_X, eval_y)]


def _dataset_names(
    pairs: Sequence[tuple[FeatureData, ColumnData]],
    original_X: Sequence[str] | str | None,
    training: tuple[FeatureData, ColumnData],
) -> list[tuple[str, str]]:
    """Give for each pair the dataset's name, "train" for the training rows, and what users see."""
    original_X = [original_X] if isinstance(original_X, str) else original_X
    names: list[tuple[str, str]] = []
    for number, (features, label) in enumerate(pairs):
        seen = _each(original_X, number)
        if features is training[0] and label is training[1]:
            names.append(("train", seen or "training"))
        elif seen in {None, "train", *(name for name, _ in names)}:
            names.append((f"valid_{number}", seen or f"valid_{number}"))
        else:
            names.append((seen, seen))
    return names


def _each(values: Any, number: int) -> Any:
    if values is None:
        return None
    return values.get(number) if isinstance(values, dict) else values[number]


def _categorical_names(categorical: Any, names: Sequence[str]) -> list[str] | None:
    if isinstance(categorical, str):
        return None
    return [each if isinstance(each, str) else names[each] for each in categorical]
