"""LightGBM's network during the training function."""

from __future__ import annotations

import functools
import os
import signal
from collections.abc import Callable
from typing import Any

import lightgbm
import numpy as np
import pytest

from drawbar.lightgbm import (
    LightGBMConfig,
    RayTrainReportCallback,
    get_network_params,
    train,
)
from drawbar.train import Result, WorkerGroupError, get_context
from drawbar.train.testing import BackendContract, run_in_threads


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_cluster")
class TestLightGBM(BackendContract):
    backend_config = LightGBMConfig()


def train_shard(x: Any, y: Any, rounds: int = 5, **options: Any) -> str:
    context = get_context()
    mine = slice(context.get_world_rank(), None, context.get_world_size())
    params = {"objective": "binary", "verbosity": -1, **get_network_params()}
    data = lightgbm.Dataset(np.ascontiguousarray(x[mine]), y[mine])
    return trees(lightgbm.train(params, data, rounds, **options))


def trees(booster: lightgbm.Booster) -> str:
    return booster.model_to_string().partition("\nparameters")[0]


def test_network_in_reused_process_trains_again(
    fit_on_ray: Callable[..., Result], binary: Any
) -> None:
    """A peer dies in the middle of training; the other gets an error from C, and is kept."""

    def function() -> tuple[int, bool, dict[str, Any], str]:
        context = get_context()
        kept = context.cache.get("pid") == os.getpid()
        context.cache["pid"] = os.getpid()
        doomed = context.get_attempt() == 0 and context.get_world_rank() == 1

        def die(env: Any) -> None:
            if doomed and env.iteration == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        network = get_network_params()
        return context.get_attempt(), kept, network, train_shard(*binary, callbacks=[die])

    first, second = fit_on_ray(function, max_failures=1).return_values
    assert (first[:2], second[:2]) == ((1, True), (1, False))
    assert first[2:] == second[2:]  # the ranks train one model
    assert first[3].count("\nTree=") == 5
    assert first[2] == {
        "num_threads": 1,  # the worker's CPU
        "num_machines": 2,
        "tree_learner": "data",
        "pre_partition": True,
    }


def test_one_worker_has_no_network(fit: Callable[..., Result]) -> None:
    assert set(fit(get_network_params, num_workers=1).return_value) == {"num_threads"}


def test_serial_tree_learner_needs_one_worker(
    fit: Callable[..., Result], binary: tuple[Any, Any]
) -> None:
    params = {"tree_learner": "serial", "verbosity": -1}

    def function() -> str:
        model: str = train(params, lightgbm.Dataset(*binary), 2).model_to_string()
        return model

    assert "[tree_learner: serial]" in fit(function, num_workers=1).return_value
    with pytest.raises(WorkerGroupError, match="'serial' needs a single worker"):
        fit(function, num_workers=2)


def test_training_function_raises_if_several_workers_change_the_model(
    fit: Callable[..., Result], binary: tuple[Any, Any]
) -> None:
    features, label = binary

    def function(**params: Any) -> None:
        weight = np.full(len(label), get_context().get_world_rank())
        train({"verbosity": -1, **params}, lightgbm.Dataset(features, label, weight=weight), 2)

    with pytest.raises(WorkerGroupError, match=r"Ranks \[0\] have no rows with a weight above 0"):
        fit(function)
    unsupported = {
        "linear_trees": True,
        "interaction_constraints": [[0], [1]],
        "monotone_constraints_method": "advanced",
    }
    for name, value in unsupported.items():
        with pytest.raises(WorkerGroupError, match=rf"'{name}'.*needs a single worker"):
            fit(functools.partial(function, **{name: value}))


def test_get_network_params_outside_training_function_raises() -> None:
    with pytest.raises(RuntimeError, match="inside a training function"):
        get_network_params()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port_range": (20000,)}, "first and the last port"),
        ({"port_range": (30000, 20000)}, "first and the last port"),
        ({"port_range": (80, 90)}, "1024"),
        ({"timeout_s": 0}, "must be positive and finite, found 0"),
        ({"timeout_s": "1"}, "must be seconds or a timedelta"),
    ],
)
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        LightGBMConfig(**options)


def test_report_callback_in_function_of_other_trainer_raises() -> None:
    def train_func() -> None:
        rows = lightgbm.Dataset(np.arange(40.0).reshape(-1, 1), np.arange(40.0))
        options = {"objective": "regression", "verbose": -1}
        train(options, rows, 2, callbacks=[RayTrainReportCallback()])

    with pytest.raises(WorkerGroupError, match="needs the workers of a LightGBMTrainer"):
        run_in_threads(train_func, num_workers=1)
