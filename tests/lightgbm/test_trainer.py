"""Training from parameters for all kinds of rows, splits, and columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightgbm
import numpy as np
import pandas as pd
import pyarrow as pa
import pytest
import ray
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits
from sklearn.metrics import log_loss, r2_score, roc_auc_score

from drawbar.lightgbm import LightGBMConfig, LightGBMTrainer, RayTrainReportCallback, train
from drawbar.train import (
    Checkpoint,
    Result,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
    WorkerGroupError,
)
from tests.boosting.shards import train_in_threads

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:ray.data")  # it warns of itself


def metrics_of(result: Result) -> dict[str, Any]:
    assert result.metrics is not None
    return result.metrics


def booster_of(result: Result) -> lightgbm.Booster:
    assert result.checkpoint is not None
    return RayTrainReportCallback.get_model(result.checkpoint)


def trees(booster: lightgbm.Booster) -> str:
    return booster.model_to_string(num_iteration=-1).partition("\nparameters")[0]


def frame(x: Any, y: Any, **columns: Any) -> pd.DataFrame:
    return pd.DataFrame({f"f{i}": x[:, i] for i in range(x.shape[1])} | {"y": y, **columns})


def alone(params: dict[str, Any], data: pd.DataFrame, rounds: int = 15) -> lightgbm.Booster:
    features = data.drop(columns="y")
    return lightgbm.train(
        {**params, "verbosity": -1}, lightgbm.Dataset(features, data["y"]), rounds
    )


def test_squared_error_gives_the_trees_of_one_process(declare: Callable[..., Result]) -> None:
    """On continuous features, and to the last bit: nothing is estimated where hessians are 1."""
    x, y = load_diabetes(return_X_y=True)
    data = frame(x.astype(np.float32), y)[:441]
    params = {"objective": "regression", "num_leaves": 8}
    result = declare(params, data, num_workers=3)
    features = data.drop(columns="y")
    expected = alone(params, data).predict(features)
    assert booster_of(result).predict(features) == pytest.approx(expected, rel=1e-12)


def test_zeros_and_missing_values_have_the_bins_of_one_process(
    declare: Callable[..., Result],
) -> None:
    random = np.random.default_rng(0)
    x = random.normal(size=(3000, 6)).astype(np.float32)
    x[random.random((3000, 6)) < [0, 0.3, 0.9, 0, 0.3, 0.9]] = 0
    x[random.random((3000, 6)) < [0, 0, 0, 0.3, 0.3, 0.05]] = np.nan
    data = frame(x, np.nansum(x, axis=1) + np.isnan(x[:, 3]))
    params = {"objective": "regression", "num_leaves": 8}
    expected = alone(params, data).predict(data.drop(columns="y"))
    predicted = booster_of(declare(params, data)).predict(data.drop(columns="y"))
    assert predicted == pytest.approx(expected, rel=1e-12)


def test_feature_of_doubles_in_one_block_is_a_double_in_all(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("drawbar._boosting.reader.BLOCK_BYTES", 4 * 100)
    x = np.arange(200)
    y = np.sin(x / 20)
    data = pd.DataFrame({"f0": x, "y": y})
    tables = [
        pa.table({"f0": pa.array(x[:100], pa.int16()), "y": y[:100]}),
        pa.table({"f0": pa.array(x[100:], pa.float64()), "y": y[100:]}),
    ]
    trainer = LightGBMTrainer(
        params={"verbosity": -1, "num_threads": 1},
        label_column="y",
        datasets={"train": data},
        num_boost_round=15,
        scaling_config=ScalingConfig(num_workers=1),
        run_config=run_config,
    )
    result = train_in_threads(trainer, LightGBMConfig(), lambda: {"train": tables})
    expected = alone({}, data).predict(data[["f0"]])
    assert booster_of(result).predict(data[["f0"]]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("params", "by_rows"),
    [({}, 1), ({"force_col_wise": True}, 0), ({"max_bins": 5000}, 0)],
)
def test_histograms_are_added_up_by_rows_where_bins_are_few(
    declare: Callable[..., Result], binary: Any, params: dict[str, Any], by_rows: int
) -> None:
    result = declare(params, frame(*binary), num_boost_round=1)
    assert f"[force_row_wise: {by_rows}]" in booster_of(result).model_to_string()


def test_parameter_none_is_not_set(declare: Callable[..., Result], binary: Any) -> None:
    params = {"num_threads": None, "max_bin": None, "tree_learner": None, "force_row_wise": None}
    model = booster_of(declare(params, frame(*binary), num_boost_round=1)).model_to_string()
    for default in ("[max_bin: 255]", "[tree_learner: data]", "[force_row_wise: 1]"):
        assert default in model
    assert "[num_threads: 0]" not in model  # which is all of the machine's


def test_held_out_loss_is_that_of_one_process(declare: Callable[..., Result]) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(y))
    data = frame(x[order], y[order])
    train, test = data[:400], data[400:]
    params = {"objective": "binary", "metric": "binary_logloss", "num_leaves": 8}
    result = declare(params, train, test, num_boost_round=30)
    expected = alone(params, train, 30).predict(test.drop(columns="y"))
    assert metrics_of(result)["valid-binary_logloss"] == pytest.approx(
        log_loss(test["y"], expected), abs=0.02
    )
    predicted = booster_of(result).predict(test.drop(columns="y"))
    assert metrics_of(result)["valid-binary_logloss"] == pytest.approx(
        log_loss(test["y"], predicted)
    )


def test_model_is_independent_of_row_split(
    declare: Callable[..., Result],
) -> None:
    """Sorted by a continuous feature, or not: rank 0 has other values, and the trees are equal."""
    random = np.random.default_rng(0)
    x = random.normal(size=(3000, 5)).astype(np.float32)
    y = (x[:, 0] + x[:, 1] ** 2 + random.normal(size=3000) > 1).astype(int)
    data = frame(x, y)
    params = {"objective": "binary", "max_bin": 63}
    found = [
        trees(
            booster_of(
                declare(
                    params,
                    rows,
                    name=f"run-{number}",
                )
            )
        )
        for number, rows in enumerate([data, data.sort_values("f0")])
    ]
    assert found[0] == found[1]


def test_category_on_one_rank_is_merged(declare: Callable[..., Result]) -> None:
    """Sorted, so that each rank has seen other cities; strings, and NaN among them."""
    random = np.random.default_rng(0)
    cities = np.sort(random.choice(["Aachen", "Bonn", "Celle", "Dresden", "Essen"], 1000))
    effect = pd.Series(cities).map({"Aachen": 0, "Bonn": 3, "Celle": 1, "Dresden": 4, "Essen": 2})
    data = pd.DataFrame({"city": cities, "x": random.normal(size=1000)})
    data["y"] = effect + data["x"] / 10
    data.loc[::50, "city"] = None
    params = {"min_data_in_leaf": 5, "min_data_per_group": 5, "cat_smooth": 1}
    result = declare(params, data, categorical_features=["city"], num_boost_round=40)
    booster = booster_of(result)
    shuffled = data.sample(frac=1, random_state=0).dropna()
    names = pd.Categorical(shuffled["city"], categories=sorted(set(cities)))
    predicted = booster.predict(shuffled[["city", "x"]].assign(city=names))
    assert predicted == pytest.approx(shuffled["y"], abs=0.5)


@pytest.mark.parametrize("rows", [[0, 1], list(range(60))])
def test_training_with_fewer_rows_than_workers_matches_one_process(
    declare: Callable[..., Result], rows: list[int]
) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    few = frame(x, y).iloc[rows]
    validation = frame(x, y).iloc[:2]
    params = {"objective": "binary", "min_data_in_leaf": 1, "metric": ["auc", "binary_logloss"]}
    result = declare(params, few, validation, num_workers=3, num_boost_round=3)
    per_rank = result.metrics_dataframe.groupby("rank")["valid-binary_logloss"].apply(list)
    assert per_rank[0][:3] == per_rank[1][:3] == per_rank[2][:3]
    assert np.isfinite(per_rank[0]).all()


@pytest.mark.parametrize(
    ("params", "rounds"),
    [
        ({"boosting": "dart", "drop_rate": 0.5}, 15),
        ({"boosting": "rf", "bagging_freq": 1, "bagging_fraction": 0.7}, 15),
        ({"tree_learner": "voting", "top_k": 5}, 15),
    ],
)
def test_other_boosters(
    declare: Callable[..., Result], params: dict[str, Any], rounds: int
) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    data = frame(x, y)
    result = declare({"objective": "binary", **params}, data, data, num_boost_round=rounds)
    assert metrics_of(result)["valid-binary_logloss"] < 0.45
    predicted = booster_of(result).predict(data.drop(columns="y"))
    assert log_loss(y, predicted) == pytest.approx(
        metrics_of(result)["valid-binary_logloss"], abs=1e-6
    )


def test_many_classes_weights_missing_values_and_margins(declare: Callable[..., Result]) -> None:
    x, y = load_digits(n_class=3, return_X_y=True)
    x[::7, 20] = np.nan
    weight = np.where(y == 2, 1.0, 0.5)
    margins = {f"m{k}": np.full(len(y), float(k == 1)) for k in range(3)}
    data = frame(x, y, weight=weight, **margins)
    params = {"objective": "multiclass", "num_class": 3, "metric": "multi_logloss"}
    result = declare(
        params,
        data,
        data,
        weight_column="weight",
        base_margin_column=list(margins),
        num_boost_round=5,
    )
    booster = booster_of(result)
    raw = booster.predict(x.astype(np.float32), raw_score=True) + np.eye(3)[1]
    predicted = np.exp(raw) / np.exp(raw).sum(axis=1, keepdims=True)
    assert (predicted.argmax(axis=1) == y).mean() > 0.9
    assert metrics_of(result)["valid-multi_logloss"] == pytest.approx(
        log_loss(y, predicted, sample_weight=weight), rel=1e-5
    )


@pytest.mark.nightly
def test_ranking_keeps_groups_whole(declare_on_ray: Callable[..., Result], ndcg_at_3: Any) -> None:
    """Groups in any order of rows; NDCG equals the value of one process on the same trees."""
    random = np.random.default_rng(0)
    query = np.sort(random.integers(0, 40, 600))
    x = random.normal(size=(600, 4)).astype(np.float32)
    data = frame(x, random.integers(0, 4, 600), query=query)
    params = {"objective": "lambdarank", "metric": "ndcg", "ndcg_eval_at": [3]}
    shuffled = data.sample(frac=1, random_state=0)
    shuffled["query"] = shuffled["query"].astype(str).astype("category")
    result = declare_on_ray(params, shuffled, data, group_column="query")
    _, sizes = np.unique(query, return_counts=True)
    scores = booster_of(result).predict(x, raw_score=True)
    assert metrics_of(result)["valid-ndcg@3"] == pytest.approx(
        ndcg_at_3(scores, x, data["y"], sizes), abs=1e-9
    )


def logistic(predicted: Any, data: Any) -> tuple[Any, Any]:
    probability = 1 / (1 + np.exp(-predicted))
    return probability - data.get_label(), probability * (1 - probability)


def wrong(predicted: Any, data: Any) -> tuple[str, float, bool]:
    return "wrong", float(np.mean((predicted > 0) != data.get_label())), False


def test_custom_objective_and_metric(declare: Callable[..., Result]) -> None:
    x, y = load_breast_cancer(return_X_y=True)
    data = frame(x, y)
    result = declare({"objective": logistic, "metric": "None"}, data, data[:301], feval=wrong)
    scores = np.asarray(booster_of(result).predict(x[:301].astype(np.float32), raw_score=True))
    assert metrics_of(result)["valid-wrong"] == pytest.approx(np.mean((scores > 0) != y[:301]))
    assert metrics_of(result)["valid-wrong"] < 0.1


def test_rounds_and_early_stopping_among_the_parameters_are_lightgbms(
    declare: Callable[..., Result], binary: Any
) -> None:
    x, y = binary
    whole = frame(x.astype(np.float32), y)
    data, valid = whole[:400], whole[400:]
    params = {"objective": "binary", "learning_rate": 0.5, "metric": ["auc", "binary_logloss"]}
    stops = {"n_estimators": 60, "early_stopping_round": 3}
    with pytest.warns(UserWarning, match=r"params\['n_estimators'\]=60 overrides num_"):
        result = declare({**params, **stops}, data, valid)  # called with num_boost_round=15
    by_argument = declare(params, data, valid, num_boost_round=60, early_stopping_rounds=3)
    assert trees(booster_of(result)) == trees(booster_of(by_argument))
    assert booster_of(result).num_trees() < 60
    assert {"valid-auc", "valid-binary_logloss"} <= metrics_of(result).keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_column": "z"}, "label_column is 'z'"),
        ({"label_column": ["y", "a"]}, "LightGBM supports one output"),
        ({"datasets": {}}, 'must have "train"'),
        ({"params": {"machines": "a:1"}}, r"params\['machines'\] is set by Drawbar"),
        ({"params": {"n_estimators": 0}}, "at least 1"),
        ({"params": {"tree_learner": "feature"}}, "'data' or 'voting'"),
        ({"params": {"tree_learner": "serial"}}, "'serial' needs a single worker"),
        (
            {"params": {"max_bins": "many"}},
            r"params\['max_bins'\] must be an integer, found 'many'",
        ),
        ({"params": {"num_classes": 3.0}}, "must be an integer, found 3.0"),
        ({"params": {"n_jobs": 1.5}}, r"params\['n_jobs'\] must be an integer, found 1.5"),
        ({"params": {"data_seed": float("inf")}}, "must be an integer, found inf"),
        ({"params": {"linear_trees": True}}, "trains a separate model on each worker"),
        ({"params": {"interaction_constraints": [[0]]}}, "LightGBM crashes"),
        ({"params": {"mc_method": "advanced"}}, "LightGBM uses 'basic' instead"),
        (
            {"params": {"forcedbins_filename": "bins.json"}},
            "Use a training function",
        ),
        ({"early_stopping_rounds": 2}, "needs a dataset to evaluate"),
        ({"train_loop_per_worker": print}, "cannot be combined with a training function"),
        ({"label_column": None}, "Pass either train_loop_per_worker"),
        ({"num_boost_round": 0}, "at least 1"),
        ({"lightgbm_config": 3}, "must be a LightGBMConfig"),
    ],
)
def test_bad_input_fails_in_the_driver(
    ray_cluster: None, options: dict[str, Any], message: str
) -> None:
    data = ray.data.from_pandas(pd.DataFrame({"x": [0.0, 1.0], "y": [0, 1]}))
    defaults = {
        "params": {},
        "label_column": "y",
        "datasets": {"train": data},
        "scaling_config": ScalingConfig(num_workers=2),
    }
    with pytest.raises((TypeError, ValueError), match=message):
        LightGBMTrainer(**{**defaults, **options})


def test_serial_tree_learner_on_one_worker(declare: Callable[..., Result]) -> None:
    x = np.linspace(0, 1, 200)
    data = pd.DataFrame({"x": x, "y": 3 * x})
    ours = booster_of(declare({"tree_learner": "serial"}, data, num_workers=1))
    assert "[tree_learner: serial]" in ours.model_to_string()


def test_trees_of_lines_on_one_worker(declare: Callable[..., Result]) -> None:
    x = np.linspace(0, 1, 200)
    data = pd.DataFrame({"x": x, "y": 3 * x})
    ours = booster_of(declare({"linear_tree": True}, data, num_workers=1))
    plain = alone({"linear_tree": True}, data)
    assert ours.predict(data[["x"]]) == pytest.approx(plain.predict(data[["x"]]), abs=1e-6)


@pytest.mark.skipif(lightgbm.__version__ < "4.7", reason="LightGBM 4.7 adds the metric r2")
def test_r2_is_computed_over_all_rows(declare: Callable[..., Result]) -> None:
    x = np.arange(300.0)
    data = pd.DataFrame({"x": x, "y": x + 30 * np.sin(x)})  # each rank has other labels
    result = declare({"metric": "r2"}, data, data, num_workers=3)
    predicted = booster_of(result).predict(data[["x"]])
    assert metrics_of(result)["valid-r2"] == pytest.approx(r2_score(data["y"], predicted), abs=1e-6)


def test_training_metric_does_not_trigger_early_stopping(
    declare: Callable[..., Result], binary: Any
) -> None:
    x, y = binary
    train, valid = frame(x[:1500], y[:1500]), frame(x[1500:], y[1500:])
    params = {"objective": "binary", "metric": "auc", "is_provide_training_metric": True}
    result = declare(params, train, valid, early_stopping_rounds=3, num_boost_round=40)
    alone = declare(
        {**params, "is_provide_training_metric": None},
        train,
        valid,
        early_stopping_rounds=3,
        num_boost_round=40,
        name="alone",
    )
    assert booster_of(result).best_iteration == booster_of(alone).best_iteration
    predicted = booster_of(result).predict(train.drop(columns="y"), num_iteration=-1)
    found = metrics_of(result)
    assert found["train-auc"] == pytest.approx(roc_auc_score(train["y"], predicted), abs=1e-6)
    assert set(found) - set(metrics_of(alone)) == {"train-auc"}


def test_early_stopping_uses_dataset_with_the_name_training(
    ray_cluster: None, run_config: RunConfig, binary: Any
) -> None:
    """LightGBM's default name of the training data, which early stopping ignores."""
    x, y = binary
    result = LightGBMTrainer(
        params={"objective": "binary", "verbosity": -1},
        label_column="y",
        datasets={"train": frame(x[:1500], y[:1500]), "training": frame(x[1500:], y[1500:])},
        num_boost_round=200,
        early_stopping_rounds=3,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=run_config,
    ).fit()
    assert 0 < booster_of(result).best_iteration < 200


def test_labels_of_two_classes_may_be_minus_one_and_one(
    declare: Callable[..., Result], binary: Any
) -> None:
    x, y = binary
    signs = booster_of(declare({"objective": "binary"}, frame(x, 2 * y - 1)))
    same = booster_of(declare({"objective": "binary"}, frame(x, y), name="same"))
    assert np.array_equal(signs.predict(x), same.predict(x))


def test_label_out_of_range_raises(declare: Callable[..., Result]) -> None:
    data = pd.DataFrame({"x": np.arange(20.0), "y": np.arange(20) % 4})
    with pytest.raises(Exception, match=r"num_class 3 needs labels that are integers"):
        declare({"objective": "multiclass", "num_class": 3}, data)


def test_more_threads_than_cpus_are_a_warning(ray_cluster: None) -> None:
    data = ray.data.from_pandas(pd.DataFrame({"x": [0.0, 1.0], "y": [0, 1]}))
    workers = ScalingConfig(num_workers=2)  # of one CPU
    with pytest.warns(UserWarning, match=r"params\['num_threads'\]=8"):
        LightGBMTrainer(
            params={"nthread": 8},
            label_column="y",
            datasets={"train": data},
            scaling_config=workers,
        )


def test_checkpoints_load_with_the_librarys_own_loader(declare: Callable[..., Result]) -> None:
    data = pd.DataFrame({"x": np.arange(100.0), "y": np.arange(100.0)})
    result = declare({}, data, num_workers=1, num_boost_round=3)
    path = Checkpoint(result.checkpoint.path).path if result.checkpoint else ""
    assert lightgbm.Booster(model_file=f"{path}/model.txt").num_trees() == 3


def test_checkpoints_are_validated(declare: Callable[..., Result], binary: Any) -> None:
    def validate(checkpoint: Checkpoint) -> dict[str, int]:
        return {"trees": RayTrainReportCallback.get_model(checkpoint).num_trees()}

    result = declare(
        {"objective": "binary", "verbosity": -1},
        frame(*binary),
        num_workers=1,
        callbacks=[RayTrainReportCallback(frequency=10, validation=True)],
        validation_config=ValidationConfig(validate),
    )
    assert [metrics["trees"] for _, metrics in result.best_checkpoints] == [10, 15]


@pytest.mark.parametrize("column", ["w", "m"])
def test_missing_number_of_a_row_raises(declare: Callable[..., Result], column: str) -> None:
    """LightGBM itself would train with 0."""
    data = frame(np.zeros((40, 1)), np.arange(40.0), w=1.0, m=0.5)
    data.loc[7, column] = None
    with pytest.raises(WorkerGroupError, match=f"1 of 40 values in column '{column}'"):
        declare({}, data, weight_column="w", base_margin_column="m")


VALID: dict[str, Any] = {
    "label": [1.0, 2.0, 3.0],
    "weight": [1.0, 1.0, 1.0],
    "init_score": [0.0, 0.0, 0.0],
}


@pytest.mark.parametrize("field", VALID)
@pytest.mark.parametrize(
    "invalid",
    [
        np.array([1.0, np.nan, 1.0]),
        np.array([1.0, np.inf, 1.0]),
        [1.0, math.nan, 1.0],
        pd.Series([1.0, None, 1.0]),
        pa.chunked_array([[1.0, None], [1.0]]),
    ],
    ids=["NaN", "infinite", "list", "pandas", "Arrow"],
)
@pytest.mark.parametrize("name", ["train_set", r"valid_sets\[0\]"])
def test_missing_number_in_dataset_of_training_function_raises(
    fit: Callable[..., Result], field: str, invalid: Any, name: str
) -> None:
    def function() -> None:
        datasets = [lightgbm.Dataset(np.zeros((3, 1)), **VALID) for _ in range(2)]
        changed = lightgbm.Dataset(np.zeros((3, 1)), **{**VALID, field: invalid})
        datasets[name != "train_set"] = changed
        train({"verbosity": -1}, datasets[0], 2, valid_sets=datasets[1])

    with pytest.raises(WorkerGroupError, match=f"1 of 3 values in the {field} of {name}"):
        fit(function, num_workers=1)
