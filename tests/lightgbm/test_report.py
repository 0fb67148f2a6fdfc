"""Reports and checkpoints from inside `lightgbm.train`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pytest
from sklearn.metrics import average_precision_score, log_loss, roc_auc_score

from drawbar.lightgbm import (
    GlobalEvaluation,
    RayTrainReportCallback,
    allreduce_metric,
    get_network_params,
)
from drawbar.train import Checkpoint, Result, get_context, runs
from drawbar.train._worker.active_session import current_session

METRICS = ["binary_logloss", "auc", "average_precision", "rmse", "l1"]


def metrics_of(result: Result) -> dict[str, Any]:
    assert result.metrics is not None
    return result.metrics


def share(*arrays: Any, uneven: bool = False) -> tuple[Any, ...]:
    """Return this rank's rows: every n-th row, or only a tenth for the first rank."""
    context = get_context()
    rank, size = context.get_world_rank(), context.get_world_size()
    rows = np.arange(rank, len(arrays[0]), size)
    if uneven:
        tenth = len(arrays[0]) // 10
        rows = (
            np.arange(tenth) if rank == 0 else np.arange(tenth + rank - 1, len(arrays[0]), size - 1)
        )
    return tuple(np.ascontiguousarray(array[rows]) for array in arrays)


def early_stopped(x: Any, y: Any, noisy: Any, callback: Any) -> Any:
    """Train on noise until validation gets worse, on uneven shards of it."""
    params = {"objective": "binary", "metric": METRICS, "verbosity": -1, "learning_rate": 0.5}
    data = lightgbm.Dataset(*share(x, noisy))
    valid = data.create_valid(*share(x, y, uneven=True))
    history: dict[str, Any] = {}
    callbacks = [
        callback,
        lightgbm.early_stopping(3, first_metric_only=True, verbose=False),
        lightgbm.record_evaluation(history),
    ]
    booster = lightgbm.train(
        {**params, **get_network_params()}, data, 60, valid_sets=[valid], callbacks=callbacks
    )
    rounds = len(history["valid_0"]["auc"])
    return rounds, booster.best_iteration, history["valid_0"], booster.predict(x)


@pytest.fixture(params=[2, 3])
def stopped(request: Any, fit: Callable[..., Result], binary: Any) -> Result:
    x, y = binary
    noisy = np.where(np.random.default_rng(1).random(len(y)) < 0.3, 1 - y, y)
    return fit(lambda: early_stopped(x, y, noisy, RayTrainReportCallback()), request.param)


def test_sharded_validation_ends_all_ranks_on_one_round(stopped: Result, binary: Any) -> None:
    x, y = binary
    rounds, best, history, predicted = stopped.return_values[0]
    assert rounds == best + 3 < 60
    for other in stopped.return_values[1:]:
        assert other[:3] == (rounds, best, history)
    last = {name: values[best - 1] for name, values in history.items()}
    assert last["binary_logloss"] == pytest.approx(log_loss(y, predicted), rel=1e-6)
    assert last["auc"] == pytest.approx(roc_auc_score(y, predicted), abs=1e-12)
    assert last["average_precision"] == pytest.approx(average_precision_score(y, predicted))
    assert last["rmse"] == pytest.approx(np.sqrt(np.mean((predicted - y) ** 2)), rel=1e-6)
    assert last["l1"] == pytest.approx(np.abs(predicted - y).mean(), rel=1e-6)

    rows = stopped.metrics_dataframe.query("rank == 0")
    assert len(rows) == rounds + 1  # the report with the checkpoint repeats the last round
    assert list(rows["valid_0-auc"][:-1]) == history["auc"]
    assert stopped.checkpoint is not None
    booster = RayTrainReportCallback.get_model(stopped.checkpoint)
    assert booster.best_iteration == best
    assert np.array_equal(booster.predict(x), predicted)


def test_checkpoints_every_so_often_and_at_the_end(fit: Callable[..., Result], binary: Any) -> None:
    def function() -> None:
        report = RayTrainReportCallback(
            {"loss": "training-binary_logloss"},
            filename="forest.txt",
            frequency=4,
        )
        params = {"objective": "binary", "verbosity": -1, **get_network_params()}
        data = lightgbm.Dataset(*share(*binary))
        lightgbm.train(params, data, 10, valid_sets=[data], callbacks=[report])

    result = fit(function)
    names = sorted(checkpoint.path for checkpoint, _ in result.best_checkpoints)
    assert [int(name[-6:]) for name in names] == [3, 7, 10]
    progress = runs.find_run(result.path).progress
    assert progress is not None
    assert (progress.done, progress.total, progress.unit) == (10, 10, "rounds")
    last = RayTrainReportCallback.get_model(Checkpoint(names[-1]), filename="forest.txt")
    assert last.num_trees() == 10
    assert set(metrics_of(result)) == {"loss"}
    with pytest.raises(
        FileNotFoundError, match=r"no 'model\.txt'. Its files: forest.txt, progress.json"
    ):
        RayTrainReportCallback.get_model(Checkpoint(names[-1]))


def test_cross_validation_reports_mean_and_spread(fit: Callable[..., Result], binary: Any) -> None:
    def function() -> int:
        params = {"objective": "binary", "verbosity": -1}
        data = lightgbm.Dataset(*binary)
        lightgbm.cv(params, data, 3, nfold=2, callbacks=[RayTrainReportCallback()])
        # Ctrl-C waits only for functions that have called should_checkpoint().
        return current_session("test").requests.call_count

    result = fit(function, num_workers=1)
    assert len(result.metrics_dataframe) == 3
    assert result.return_value == 0
    assert (
        0
        < metrics_of(result)["valid-binary_logloss-stdv"]
        < metrics_of(result)["valid-binary_logloss-mean"]
    )


def test_custom_metrics_are_of_all_rows(fit: Callable[..., Result], binary: Any) -> None:
    """A mean over rows is so by itself; a precision, by its numerator and denominator."""
    x, y = binary

    def wrong(predicted: Any, data: Any) -> tuple[str, float, bool]:
        return "wrong", float(np.mean((predicted > 0.5) != data.get_label())), False

    def precision(predicted: Any, data: Any) -> tuple[str, float, bool]:
        found = data.get_label()[predicted > 0.5]
        return "precision", allreduce_metric(found.sum(), len(found)), True

    def function() -> tuple[Any, Any]:
        params = {"objective": "binary", "metric": "None", "verbosity": -1}
        data = lightgbm.Dataset(*share(x, y))
        found: dict[str, Any] = {}
        booster = lightgbm.train(
            {**params, **get_network_params()},
            data,
            3,
            valid_sets=[data.create_valid(*share(x, y, uneven=True))],
            feval=[wrong, precision],
            callbacks=[GlobalEvaluation(), lightgbm.record_evaluation(found)],
        )
        return {name: values[-1] for name, values in found["valid_0"].items()}, booster.predict(x)

    (first, predicted), (second, _) = fit(function).return_values
    assert first == second
    assert first["wrong"] == pytest.approx(np.mean((predicted > 0.5) != y), abs=1e-12)
    assert first["precision"] == pytest.approx(y[predicted > 0.5].mean(), abs=1e-12)


def test_cross_entropy_lambda_of_weighted_rows_is_that_of_all_rows(
    fit: Callable[..., Result],
) -> None:
    """LightGBM divides its weighted sum by the number of rows."""
    random = np.random.default_rng(0)
    x, y, weight = random.normal(size=(90, 2)), random.random(90), random.uniform(0.1, 4, 90)
    params = {"metric": "cross_entropy_lambda", "objective": "regression", "verbosity": -1}

    def function() -> Any:
        mine = [slice(0, 60), slice(60, None)][get_context().get_world_rank()]
        data = lightgbm.Dataset(x[mine], y[mine], free_raw_data=False)
        found: dict[str, Any] = {}
        booster = lightgbm.train(
            {**params, **get_network_params()},
            data,
            2,
            valid_sets=[data.create_valid(x[mine], y[mine], weight=weight[mine])],
            callbacks=[GlobalEvaluation(), lightgbm.record_evaluation(found)],
        )
        return found["valid_0"]["cross_entropy_lambda"][-1], booster.model_to_string()

    value, model = fit(function).return_values[0]
    scores = lightgbm.Booster(model_str=model).predict(x, raw_score=True)
    data = lightgbm.Dataset(x, y, weight=weight, init_score=scores)
    assert value == pytest.approx(lightgbm.Booster(params, data).eval_train()[0][2])


def test_mean_of_auc_mu_is_a_warning(declare: Callable[..., Result]) -> None:
    rows = pd.DataFrame({"x": np.arange(90.0), "y": np.arange(90) % 3})
    params = {"objective": "multiclass", "num_class": 3, "metric": "auc_mu"}
    with pytest.warns(UserWarning, match="'auc_mu' is the mean of the workers' values"):
        declare(params, rows, rows, num_boost_round=2)


def test_metrics_that_lightgbm_ignores_are_a_warning(declare: Callable[..., Result]) -> None:
    rows = pd.DataFrame({"x": np.arange(90.0), "y": np.arange(90) + 1.0})
    names = ["mse", "l2_root", "MAE", "mean_absolute_percentage_error", "none"]
    with pytest.warns(UserWarning, match=r"has ignored \['acuracy', 'ndcg@3'\] in params\['metric"):
        declare({"metric": [*names, "acuracy", "ndcg@3"]}, rows, rows, num_boost_round=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for objective in ("binary", "xentropy", "xentlambda"):
            data = rows.assign(y=rows["x"] > 40)
            params = {"objective": objective, "metric": f"{objective},kldiv"}
            declare(params, data, data, num_boost_round=1, num_workers=1, name=objective)


def test_ranking_metrics_are_means_over_all_groups(
    fit: Callable[..., Result], ndcg_at_3: Any
) -> None:
    """Rank 0 has the first 5 groups, rank 1 the other 35; NDCG as of one process with all."""
    random = np.random.default_rng(0)
    sizes = random.integers(3, 12, 40)
    x, y = random.normal(size=(sizes.sum(), 4)), random.integers(0, 4, sizes.sum())
    params = {"objective": "lambdarank", "ndcg_eval_at": [3], "verbosity": -1}

    def function() -> Any:
        groups = [slice(0, 5), slice(5, None)][get_context().get_world_rank()]
        begin, rows = sum(sizes[: groups.start]), sum(sizes[groups])
        mine = slice(begin, begin + rows)
        data = lightgbm.Dataset(x[mine], y[mine], group=sizes[groups])
        found: dict[str, Any] = {}
        booster = lightgbm.train(
            {**params, **get_network_params()},
            data,
            5,
            valid_sets=[data.create_valid(x[mine], y[mine], group=sizes[groups])],
            callbacks=[GlobalEvaluation(), lightgbm.record_evaluation(found)],
        )
        return found["valid_0"]["ndcg@3"][-1], booster.model_to_string()

    (first, model), (second, _) = fit(function).return_values
    assert first == second
    scores = lightgbm.Booster(model_str=model).predict(x, raw_score=True)
    assert first == pytest.approx(ndcg_at_3(scores, x, y, sizes), abs=1e-9)


def test_areas_of_weighted_rows_with_ties_are_those_of_scikit_learn(
    fit: Callable[..., Result],
) -> None:
    random = np.random.default_rng(0)
    labels, weights = random.integers(0, 2, 500).astype(float), random.random(500)
    x = np.round(random.random((500, 1)) + labels[:, None] / 4, 1)  # so there are many ties

    def function() -> tuple[dict[str, Any], Any]:
        found: dict[str, Any] = {}
        params = {"objective": "binary", "metric": ["auc", "average_precision"], "verbosity": -1}
        data = lightgbm.Dataset(*share(x, labels))
        rows, targets, row_weights = share(x, labels, weights, uneven=True)
        booster = lightgbm.train(
            {**params, **get_network_params()},
            data,
            1,
            valid_sets=[
                data.create_valid(rows, targets, weight=row_weights),
                data.create_valid(rows, np.ones_like(targets)),
            ],
            callbacks=[GlobalEvaluation(), lightgbm.record_evaluation(found)],
        )
        return found, booster.predict(x)

    (found, scores), _ = fit(function).return_values
    assert len(set(scores)) < 20
    assert found["valid_0"]["auc"] == pytest.approx(
        [roc_auc_score(labels, scores, sample_weight=weights)], abs=1e-7
    )
    assert found["valid_0"]["average_precision"] == pytest.approx(
        [average_precision_score(labels, scores, sample_weight=weights)], abs=1e-7
    )
    assert found["valid_1"]["auc"] == [1.0]


def test_wrong_settings_of_the_callback() -> None:
    with pytest.raises(ValueError, match="frequency must not be negative"):
        RayTrainReportCallback(frequency=-1)
    with pytest.raises(TypeError, match="frequency must be an int"):
        RayTrainReportCallback(frequency=1.5)  # type: ignore[arg-type]
