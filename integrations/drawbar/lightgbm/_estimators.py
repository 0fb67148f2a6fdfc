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
    Features,
    Labelled,
    Progress,
    RayEstimator,
    Rows,
    Values,
    alike,
    classes_of,
    feature_names,
    has_names,
    is_ray_dataset,
    rows_of,
    takes_plain_arguments,
    without_own,
)
from drawbar.lightgbm._parameters import name_of, value_of
from drawbar.lightgbm._predict import predict_rows
from drawbar.lightgbm._report import RayTrainReportCallback
from drawbar.lightgbm._trainer import LightGBMTrainer
from drawbar.train import Checkpoint

Model: TypeAlias = Booster | LGBMModel | str | Path
"""What to go on from; a str is a path, too."""


class _RayLGBMModel(RayEstimator, LGBMModel):
    """`LGBMModel` whose `fit` trains on workers.

    In the order of bases it stands behind the plain estimator, whose own `fit` (which numbers the
    classes) calls this one.
    """

    def _process_params(self, stage: str) -> dict[str, object]:
        params = without_own(super()._process_params(stage))
        if stage == "fit":
            threads = value_of(self.get_params(), "num_threads", -1)
            params["num_threads"] = max(threads, 0)  # 0: a worker's own share
        return params

    def fit(
        self,
        X: Features,
        y: Values,
        sample_weight: Values = None,
        init_score: Values = None,
        group: Values = None,
        eval_set: Sequence[tuple[Features, Values]] | None = None,
        eval_names: Sequence[str] | None = None,
        eval_sample_weight: object = None,
        eval_class_weight: object = None,
        eval_init_score: object = None,
        eval_group: object = None,
        eval_metric: object = None,
        feature_name: object = "auto",
        categorical_feature: object = "auto",
        callbacks: Sequence[object] | None = None,
        init_model: Model | None = None,
        *,
        eval_X: Features = None,
        eval_y: Values = None,
    ) -> Self:
        """Do what `LGBMModel.fit` does, on workers."""
        params = self._process_params("fit")
        rounds = {"early_stopping_rounds": _take(params, "early_stopping_round")}
        custom = _add_metrics(params, eval_metric)
        given, (X, sample_weight) = X, self._checked(X, y, sample_weight)
        named = isinstance(X, Labelled) or has_names(X)
        names = self._names(X, feature_name)
        training = rows_of(
            X,
            y,
            weight=self._weights(X, y, sample_weight),
            group=group,
            margin=init_score,
        )
        pairs = _pairs(eval_set, eval_X, eval_y)
        datasets = _dataset_names(pairs, eval_names, (given, y))
        evaluated = {
            name: rows_of(
                features,
                label,
                weight=self._weight_of(eval_sample_weight, eval_class_weight, label, number),
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
        rows = dict(zip(["train", *evaluated], alike([training, *evaluated.values()]), strict=True))
        booster, progress = self._train(
            rows,
            names,
            by_name=isinstance(feature_name, str) and named,
            params=params,
            categorical_features=_named(categorical_feature, names),
            callbacks=[RayTrainReportCallback(), *(callbacks or ())],
            feval=custom or None,
            init_model=init_model,
            **rounds,
        )
        self._keep(booster, progress, {"train": "training", **dict(datasets)}, named=named)
        return self

    def _names(self, X: Features, given: Any) -> list[str]:
        """Give the names of the features; a Ray Dataset has its own."""
        if isinstance(X, Labelled) or is_ray_dataset(X):
            return []
        return feature_names(X, "Column_") if isinstance(given, str) else list(given)

    def _train(
        self,
        rows: dict[str, Rows],
        names: Sequence[str],
        *,
        by_name: bool,
        init_model: Model | None,
        **options: Any,
    ) -> tuple[Booster, Progress]:
        datasets = {name: each.dataset(names, by_name=by_name) for name, each in rows.items()}
        with self._run() as configs, tempfile.TemporaryDirectory() as folder:
            earlier, before = _checkpoint_of(init_model, Path(folder))
            result = LightGBMTrainer(
                datasets=datasets,
                num_boost_round=before + self.n_estimators,
                resume_from_checkpoint=earlier,
                **rows["train"].columns(),
                **configs,
                **options,
            ).fit()
            assert result.checkpoint is not None
            booster = RayTrainReportCallback.get_model(result.checkpoint)
            return booster, Progress.load(result.checkpoint) or Progress()

    def _keep(
        self, booster: Booster, progress: Progress, shown: Mapping[str, str], *, named: bool
    ) -> None:
        """Set what plain LightGBM sets after training."""
        self._Booster = booster
        last = booster.best_iteration - 1 - progress.first if booster.best_iteration > 0 else -1
        self._n_features = self.n_features_in_ = booster.num_feature()
        self._fitted_with_feature_names = named
        self._evals_result = {shown[name]: each for name, each in progress.history.items()}
        self._best_iteration = max(booster.best_iteration, 0)
        self._best_score = {
            data: {metric: values[last] for metric, values in by_metric.items()}
            for data, by_metric in self._evals_result.items()
        }
        booster.best_score = self._best_score
        self.fitted_ = True

    def _checked(self, X: Features, y: Values, weight: Values) -> tuple[Features, Values]:
        """Check as `LGBMModel.fit` does."""
        if isinstance(X, Labelled) or is_ray_dataset(X):
            return X, weight
        if hasattr(X, "columns"):
            self.n_features_in_ = len(X.columns)
            return X, weight
        from sklearn.utils.validation import _check_sample_weight, validate_data

        X, _ = validate_data(
            self, X, y, accept_sparse=True, ensure_all_finite=False, ensure_min_samples=2
        )
        return X, None if weight is None else _check_sample_weight(weight, X)

    def _weights(self, X: Features, y: Values, weight: Values) -> Values:
        """Give the rows' weights, those of their classes included."""
        if self._class_weight is None:
            self._class_weight = self.class_weight
        if self._class_weight is None:
            return weight
        if isinstance(X, Labelled):
            raise ValueError(
                f"class_weight={self._class_weight!r} needs the labels in memory; with a Ray "
                "Dataset, put the weights into a column and name it in sample_weight"
            )
        return _with_class_weights(weight, self._class_weight, y)

    def _weight_of(
        self, weights: object, class_weights: object, label: Values, number: int
    ) -> Values:
        weight, by_class = _each(weights, number), _each(class_weights, number)
        if by_class is None:
            return weight
        if isinstance(by_class, dict) and self._class_map is not None:
            by_class = {self._class_map[name]: value for name, value in by_class.items()}
        return _with_class_weights(weight, by_class, label)

    def predict(self, X: Features, *args: Any, **options: Any) -> Any:
        """Do what the plain estimator does; a Ray Dataset gets a column `prediction`."""
        if not is_ray_dataset(X):
            return super().predict(X, *args, **options)
        return predict_rows(self, "predict", X, options)


@takes_plain_arguments
class RayLGBMRegressor(LGBMRegressor, _RayLGBMModel):  # type: ignore[misc]  # two fits
    """`lightgbm.LGBMRegressor`, trained on workers."""


@takes_plain_arguments
class RayLGBMRanker(LGBMRanker, _RayLGBMModel):  # type: ignore[misc]  # two fits
    """`lightgbm.LGBMRanker`, trained on workers. The rows of a query go to one of them."""


@takes_plain_arguments
class RayLGBMClassifier(LGBMClassifier, _RayLGBMModel):
    """`lightgbm.LGBMClassifier`, trained on workers."""

    def fit(self, X: Features, y: Values, *args: Any, **options: Any) -> Self:
        """Do what `LGBMClassifier.fit` does, on workers."""
        if is_ray_dataset(X):
            classes = classes_of(X, y)
            sets = [
                (Labelled(*each, classes), classes) for each in _as_list(options.get("eval_set"))
            ]
            options["eval_set"] = sets or None
            X, y = Labelled(X, y, classes), classes
        super().fit(X, y, *args, **options)
        return self

    def predict(self, X: Features, *args: Any, **options: Any) -> Any:
        """Do what the plain estimator does; a Ray Dataset gets a column `prediction`."""
        if not is_ray_dataset(X):
            return super().predict(X, *args, **options)
        return predict_rows(self, "predict", X, options)

    def predict_proba(self, X: Features, *args: Any, **options: Any) -> Any:
        """Do what the plain estimator does; a Ray Dataset gets a column `prediction`."""
        if not is_ray_dataset(X):
            return super().predict_proba(X, *args, **options)
        return predict_rows(self, "predict_proba", X, options)


def _checkpoint_of(model: Model | None, folder: Path) -> tuple[Checkpoint | None, int]:
    """Give what to go on from as a checkpoint, and its number of rounds."""
    if model is None:
        return None, 0
    if isinstance(model, LGBMModel):
        model = model.booster_
    booster = model if isinstance(model, Booster) else Booster(model_file=model)
    booster.save_model(folder / RayTrainReportCallback.CHECKPOINT_NAME, num_iteration=-1)
    return Checkpoint(folder), booster.current_iteration()


def _take(params: dict[str, object], name: str) -> object:
    found = name_of(params, name)
    return params.pop(found) if found else None


def _add_metrics(params: dict[str, object], given: object) -> list[object]:
    """Put the metrics of `fit` before the objective's own; gives the custom ones."""
    metrics = given if isinstance(given, list) else [] if given is None else [given]
    own = params["metric"] if isinstance(params["metric"], list) else [params["metric"]]
    built_in = [each for each in metrics if isinstance(each, str) and each not in own]
    params["metric"] = [*built_in, *(each for each in own if each is not None)]
    return [_EvalFunctionWrapper(each) for each in metrics if callable(each)]


def _with_class_weights(weight: Values, by_class: object, label: Values) -> Values:
    from sklearn.utils.class_weight import compute_sample_weight

    by_row = compute_sample_weight(by_class, label)
    return by_row if weight is None else by_row * weight


def _as_list(eval_set: Any) -> list[tuple[Features, Values]]:
    return [eval_set] if isinstance(eval_set, tuple) else list(eval_set or ())


def _pairs(eval_set: object, eval_X: Features, eval_y: Values) -> list[tuple[Features, Values]]:
    """Give features and labels to evaluate, in whichever of two ways they were given."""
    if eval_set is not None or eval_X is None:
        return _as_list(eval_set)
    if isinstance(eval_X, tuple):
        return list(zip(eval_X, eval_y, strict=True))
    return [(eval_X, eval_y)]


def _dataset_names(
    pairs: Sequence[tuple[Features, Values]],
    given: Sequence[str] | str | None,
    training: tuple[Features, Values],
) -> list[tuple[str, str]]:
    """Give for each pair the dataset's name, "train" for the training rows, and what users see."""
    given = [given] if isinstance(given, str) else given
    names: list[tuple[str, str]] = []
    for number, (features, label) in enumerate(pairs):
        seen = _each(given, number)
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


def _named(categorical: Any, names: Sequence[str]) -> list[str] | None:
    if isinstance(categorical, str):
        return None
    return [each if isinstance(each, str) else names[each] for each in categorical]
