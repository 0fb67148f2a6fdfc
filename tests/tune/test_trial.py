"""Tests of trials without Ray: supported configs, and resources."""

from __future__ import annotations

from typing import Any

import pytest

from drawbar.train import (
    CheckpointConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
    get_context,
)
from drawbar.train.testing import run_in_threads
from drawbar.tune import TuneReportCallback, as_placement_group_factory, as_trainable


def function(config: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (RunConfig(detached=True), "Tune must be able to stop the trial"),
        (
            RunConfig(checkpoint_config=CheckpointConfig(num_to_keep=1)),
            r"ray.tune.CheckpointConfig",
        ),
    ],
)
def test_as_trainable_of_unsupported_run_config_raises(config: RunConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        as_trainable(DataParallelTrainer(function, run_config=config))


def test_placement_group_factory_contains_workers_and_validations() -> None:
    scaling = ScalingConfig(num_workers=(1, 2), resources_per_worker={"CPU": 2})
    asked = as_placement_group_factory(scaling)
    assert (asked.head_bundle_is_empty, asked.bundles) == (True, [{"CPU": 2}] * 2)
    validation = ValidationConfig(fn=lambda checkpoint: {}, ray_remote_kwargs={"num_cpus": 3})
    asked = as_placement_group_factory(scaling, validation)
    assert asked.bundles == [{"CPU": 2}] * 2 + [{"CPU": 3}] * 2
    asked = as_placement_group_factory(ScalingConfig(num_workers=0))
    assert (asked.head_bundle_is_empty, asked.bundles) == (False, [{"CPU": 1}])
    nothing = ScalingConfig(num_workers=2, resources_per_worker={})
    assert asked.strategy == as_placement_group_factory(nothing).strategy == "PACK"


def test_tune_report_callback_outside_trial_raises() -> None:
    with pytest.raises(
        RuntimeError,
        match=r"outside a Tune trial\. .* or pass trainer\.as_trainable\(\) to Tuner",
    ):
        TuneReportCallback()


def test_run_outside_trial_has_no_trial_info() -> None:
    def function() -> list[Any]:
        context = get_context()
        return [context.get_trial_name(), context.get_trial_id(), context.get_trial_dir()]

    assert run_in_threads(function).return_value == [None] * 3


def test_as_trainable_of_restored_trainer_raises() -> None:
    restored = DataParallelTrainer.__new__(DataParallelTrainer)
    with pytest.raises(RuntimeError, match=r"this DataParallelTrainer was created by restore"):
        _ = restored.init_arguments
