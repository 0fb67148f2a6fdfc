"""scikit-learn estimators that train LightGBM on Ray workers.

scikit-learn is imported only where it is used, because workers also import this module and may not
need it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, TypeAlias

from lightgbm import Booster, LGBMClassifier, LGBMModel, LGBMRanker, LGBMRegressor

from drawbar._boosting.estimators import (
    RayEstimator,
    add_drawbar_parameters,
    drop_drawbar_parameters,
)
from drawbar._boosting.progress import BoostingProgress
from drawbar._boosting.user_data import (
    ColumnData,
    EncodedDataset,
    FeatureData,
    UserData,
    feature_names,
    fill_missing_columns,
    has_feature_names,
    is_ray_dataset,
    single_output_data,
    unique_labels,
)
from drawbar.lightgbm import _fit_arguments as fit_arguments
from drawbar.lightgbm._compat import (
    EstimatorHooks,
    check_sample_weight,
    get_class_numbers,
)
from drawbar.lightgbm._parameters import get_parameter
from drawbar.lightgbm._predict import predict_rows
from drawbar.lightgbm._report_callback import RayTrainReportCallback
from drawbar.lightgbm._trainer import LightGBMTrainer
from drawbar.train import Checkpoint

InitialModel: TypeAlias = Booster | LGBMModel | str | Path
"""Model to continue from; a str is a path, too."""


class _RayLGBMModel(RayEstimator, EstimatorHooks):
    """`LGBMModel` whose `fit` trains on workers.

    In the method resolution order, it comes after LightGBM's estimator, whose `fit` (which encodes
    classes) calls this one.
    """

    def filter_params(self, params: dict[str, Any], stage: str) -> dict[str, Any]:
        """Drop Drawbar's parameters and set the threads of a worker."""
        params = drop_drawbar_parameters(params)
        if stage == "fit":
            threads = get_parameter(self.get_params(), "num_threads", -1)
            params["num_threads"] = max(threads, 0)  # 0: the worker's number of CPUs
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
        """Fit like `LGBMModel.fit`, on workers."""
        parameters = self._resolve_parameters(eval_metric)
        original_X, (X, sample_weight) = X, self._validate_inputs(X, y, sample_weight)
        has_names = isinstance(X, EncodedDataset) or has_feature_names(X)
        names = self._resolve_feature_names(X, feature_name)
        weight = self._sample_weights(X, y, sample_weight)
        training = single_output_data(X, y, weight=weight, group=group, margin=init_score)
        pairs = fit_arguments.eval_pairs(eval_set, eval_X, eval_y)
        datasets = fit_arguments.dataset_names(pairs, eval_names, (original_X, y))
        evaluated = {
            name: self._make_eval_data(
                pair, number, eval_sample_weight, eval_class_weight, eval_group, eval_init_score
            )
            for number, ((name, _), pair) in enumerate(zip(datasets, pairs, strict=True))
            if name != "train"
        }
        if len(evaluated) < len(pairs):  # LightGBM evaluates the training rows without a copy
            parameters["params"]["is_provide_training_metric"] = True
        booster, progress = self._train(
            {"train": training, **evaluated},
            names,
            by_name=isinstance(feature_name, str) and has_names,
            categorical_features=fit_arguments.categorical_names(categorical_feature, names),
            callbacks=[RayTrainReportCallback(), *(callbacks or ())],
            init_model=init_model,
            **parameters,
        )
        self._set_results(booster, progress, dict(datasets), has_names=has_names)
        return self

    def _resolve_parameters(self, eval_metric: object) -> dict[str, Any]:
        """Return the arguments of `LightGBMTrainer` that the estimator's parameters determine."""
        params = self.process_params()
        early_stopping_rounds = fit_arguments.pop_parameter(params, "early_stopping_round")
        custom = fit_arguments.add_metrics(params, eval_metric)
        return {
            "params": params,
            "early_stopping_rounds": early_stopping_rounds,
            "feval": custom or None,
        }

    def _resolve_feature_names(self, X: FeatureData, feature_name: Any) -> list[str]:
        """Return the names of the features; empty for a Ray Dataset, which has its own."""
        if isinstance(X, EncodedDataset) or is_ray_dataset(X):
            return []
        return feature_names(X, "Column_") if isinstance(feature_name, str) else list(feature_name)

    def _train(
        self,
        rows: dict[str, UserData],
        names: Sequence[str],
        *,
        by_name: bool,
        init_model: InitialModel | None,
        **options: Any,
    ) -> tuple[Booster, BoostingProgress]:
        filled = dict(zip(rows, fill_missing_columns(list(rows.values())), strict=True))
        datasets = {name: data.to_dataset(names, by_name=by_name) for name, data in filled.items()}
        with self._trainer_configs() as configs, tempfile.TemporaryDirectory() as directory:
            earlier, num_initial_rounds = _initial_checkpoint(init_model, Path(directory))
            result = LightGBMTrainer(
                datasets=datasets,
                num_boost_round=num_initial_rounds + self.n_estimators,
                resume_from_checkpoint=earlier,
                **filled["train"].role_arguments(),
                **configs,
                **options,
            ).fit()
            assert result.checkpoint is not None
            booster = RayTrainReportCallback.get_model(result.checkpoint)
            return booster, BoostingProgress.load(result.checkpoint) or BoostingProgress()

    def _set_results(
        self,
        booster: Booster,
        progress: BoostingProgress,
        display_names: Mapping[str, str],
        *,
        has_names: bool,
    ) -> None:
        """Set the attributes that LightGBM's estimator sets after training."""
        last_round = (
            booster.best_iteration - 1 - progress.first_recorded_round
            if booster.best_iteration > 0
            else -1
        )
        display_names = {"train": "training", **display_names}
        history = {display_names[name]: values for name, values in progress.history.items()}
        self.set_fitted_attributes(booster, history, last_round=last_round, has_names=has_names)

    def _validate_inputs(
        self, X: FeatureData, y: ColumnData, weight: ColumnData
    ) -> tuple[FeatureData, ColumnData]:
        """Validate the inputs like `LGBMModel.fit`."""
        if isinstance(X, EncodedDataset) or is_ray_dataset(X):
            return X, weight
        if hasattr(X, "columns"):
            self.n_features_in_ = len(X.columns)
            return X, weight
        from sklearn.utils.validation import validate_data

        X, _ = validate_data(
            self, X, y, accept_sparse=True, ensure_all_finite=False, ensure_min_samples=2
        )
        return X, None if weight is None else check_sample_weight(weight, X)

    def _sample_weights(self, X: FeatureData, y: ColumnData, weight: ColumnData) -> ColumnData:
        """Return the weights of rows, multiplied by the weights of their classes."""
        class_weight = self.get_class_weight()
        if class_weight is None:
            return weight
        if isinstance(X, EncodedDataset):
            raise ValueError(
                f"class_weight={class_weight!r} needs the labels in memory. For a Ray "
                "Dataset, add a column with the weights and pass its name as sample_weight."
            )
        return fit_arguments.with_class_weights(weight, class_weight, y)

    def _make_eval_data(
        self,
        pair: tuple[FeatureData, ColumnData],
        number: int,
        weights: object,
        class_weights: object,
        groups: object,
        init_scores: object,
    ) -> UserData:
        """Return the data of an evaluation set from its number and the options of all sets."""
        features, label = pair
        return single_output_data(
            features,
            label,
            weight=self._eval_weights(weights, class_weights, label, number),
            group=fit_arguments.get_item(groups, number),
            margin=fit_arguments.get_item(init_scores, number),
        )

    def _eval_weights(
        self, weights: object, class_weights: object, label: ColumnData, number: int
    ) -> ColumnData:
        weight, by_class = (
            fit_arguments.get_item(weights, number),
            fit_arguments.get_item(class_weights, number),
        )
        if by_class is None:
            return weight
        if isinstance(by_class, dict) and (numbers := get_class_numbers(self)) is not None:
            by_class = {numbers[name]: value for name, value in by_class.items()}
        return fit_arguments.with_class_weights(weight, by_class, label)

    def predict(self, X: FeatureData, *args: Any, **options: Any) -> Any:
        """Predict like the base class.

        For a Ray Dataset, return a dataset with an additional column `prediction`.
        """
        if not is_ray_dataset(X):
            return super().predict(X, *args, **options)
        return predict_rows(self, "predict", X, options)


@add_drawbar_parameters
class RayLGBMRegressor(LGBMRegressor, _RayLGBMModel):  # type: ignore[misc]  # two fits
    """`lightgbm.LGBMRegressor` that trains on Ray workers.

    Args:
        boosting_type: Boosting type: "gbdt", "dart", or "rf".
        num_leaves: Maximum number of leaves per tree.
        max_depth: Maximum depth of a tree; -1 for no limit.
        learning_rate: Learning rate.
        n_estimators: Number of boosting rounds.
        subsample_for_bin: Number of rows from which bins are computed.
        objective: Objective; default: same as the base class.
        class_weight: Weights of the classes.
        min_split_gain: Minimum loss reduction of a split.
        min_child_weight: Minimum sum of hessians in a leaf.
        min_child_samples: Minimum number of rows in a leaf.
        subsample: Share of rows for each tree.
        subsample_freq: Sample rows every n rounds; 0 disables it.
        colsample_bytree: Share of features for each tree.
        reg_alpha: L1 regularization.
        reg_lambda: L2 regularization.
        random_state: Random seed.
        n_jobs: Threads per worker. Default: the worker's number of CPUs.
        importance_type: Type of feature importances: "split" or "gain".
        scaling_config: Number of workers and their resources. Default: one worker.
        run_config: Run configuration: storage, restarts, output. Default: a temporary directory.
        kwargs: Other parameters of LightGBM.

    Example:
        ```python
        model = RayLGBMRegressor(n_estimators=100, scaling_config=ScalingConfig(num_workers=4))
        predictions = model.fit(X, y).predict(X)
        ```
    """


@add_drawbar_parameters
class RayLGBMRanker(LGBMRanker, _RayLGBMModel):  # type: ignore[misc]  # two fits
    """`lightgbm.LGBMRanker` that trains on Ray workers. All rows of a query go to one worker.

    Args:
        boosting_type: Boosting type: "gbdt", "dart", or "rf".
        num_leaves: Maximum number of leaves per tree.
        max_depth: Maximum depth of a tree; -1 for no limit.
        learning_rate: Learning rate.
        n_estimators: Number of boosting rounds.
        subsample_for_bin: Number of rows from which bins are computed.
        objective: Objective; default: same as the base class.
        class_weight: Weights of the classes.
        min_split_gain: Minimum loss reduction of a split.
        min_child_weight: Minimum sum of hessians in a leaf.
        min_child_samples: Minimum number of rows in a leaf.
        subsample: Share of rows for each tree.
        subsample_freq: Sample rows every n rounds; 0 disables it.
        colsample_bytree: Share of features for each tree.
        reg_alpha: L1 regularization.
        reg_lambda: L2 regularization.
        random_state: Random seed.
        n_jobs: Threads per worker. Default: the worker's number of CPUs.
        importance_type: Type of feature importances: "split" or "gain".
        scaling_config: Number of workers and their resources. Default: one worker.
        run_config: Run configuration: storage, restarts, output. Default: a temporary directory.
        kwargs: Other parameters of LightGBM.

    Example:
        ```python
        model = RayLGBMRanker(n_estimators=100, scaling_config=ScalingConfig(num_workers=4))
        scores = model.fit(X, y, group=group).predict(X)
        ```
    """


@add_drawbar_parameters
class RayLGBMClassifier(LGBMClassifier, _RayLGBMModel):
    """`lightgbm.LGBMClassifier` that trains on Ray workers.

    Args:
        boosting_type: Boosting type: "gbdt", "dart", or "rf".
        num_leaves: Maximum number of leaves per tree.
        max_depth: Maximum depth of a tree; -1 for no limit.
        learning_rate: Learning rate.
        n_estimators: Number of boosting rounds.
        subsample_for_bin: Number of rows from which bins are computed.
        objective: Objective; default: same as the base class.
        class_weight: Weights of the classes.
        min_split_gain: Minimum loss reduction of a split.
        min_child_weight: Minimum sum of hessians in a leaf.
        min_child_samples: Minimum number of rows in a leaf.
        subsample: Share of rows for each tree.
        subsample_freq: Sample rows every n rounds; 0 disables it.
        colsample_bytree: Share of features for each tree.
        reg_alpha: L1 regularization.
        reg_lambda: L2 regularization.
        random_state: Random seed.
        n_jobs: Threads per worker. Default: the worker's number of CPUs.
        importance_type: Type of feature importances: "split" or "gain".
        scaling_config: Number of workers and their resources. Default: one worker.
        run_config: Run configuration: storage, restarts, output. Default: a temporary directory.
        kwargs: Other parameters of LightGBM.

    Example:
        ```python
        model = RayLGBMClassifier(n_estimators=100, scaling_config=ScalingConfig(num_workers=4))
        probabilities = model.fit(X, y).predict_proba(X)
        ```
    """

    def fit(self, X: FeatureData, y: ColumnData, *args: Any, **options: Any) -> Self:
        """Fit like `LGBMClassifier.fit`, on workers."""
        if options.get("eval_X") is not None:  # the base class encodes only `eval_set`
            pair = options.pop("eval_X"), options.pop("eval_y", None)
            options["eval_set"] = fit_arguments.eval_pairs(options.get("eval_set"), *pair)
        if is_ray_dataset(X):
            classes = unique_labels(X, y)
            sets = [
                (EncodedDataset(*pair, classes), classes)
                for pair in fit_arguments.as_list(options.get("eval_set"))
            ]
            options["eval_set"] = sets or None
            X, y = EncodedDataset(X, y, classes), classes
        super().fit(X, y, *args, **options)
        return self

    def predict(self, X: FeatureData, *args: Any, **options: Any) -> Any:
        """Predict like the base class.

        For a Ray Dataset, return a dataset with an additional column `prediction`.
        """
        if not is_ray_dataset(X):
            return super().predict(X, *args, **options)
        return predict_rows(self, "predict", X, options)

    def predict_proba(self, X: FeatureData, *args: Any, **options: Any) -> Any:
        """Predict probabilities like the base class.

        For a Ray Dataset, return a dataset with an additional column `prediction`.
        """
        if not is_ray_dataset(X):
            return super().predict_proba(X, *args, **options)
        return predict_rows(self, "predict_proba", X, options)


def _initial_checkpoint(
    model: InitialModel | None, directory: Path
) -> tuple[Checkpoint | None, int]:
    """Save an initial model as a checkpoint, and return it with its number of rounds."""
    if model is None:
        return None, 0
    if isinstance(model, LGBMModel):
        model = model.booster_
    booster = model if isinstance(model, Booster) else Booster(model_file=model)
    booster.save_model(directory / RayTrainReportCallback.CHECKPOINT_NAME, num_iteration=-1)
    return Checkpoint(directory), booster.current_iteration()
