"""Invalid arguments of validations, and their defaults."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from drawbar import train
from drawbar.train import (
    Checkpoint,
    DataParallelTrainer,
    InsufficientResourcesError,
    RunConfig,
    ValidationConfig,
    ValidationTaskConfig,
    WorkerGroupError,
)
from tests.train.controller.validated_runs import (
    fit,
    manifests,
    save,
    save_with,
    squared,
    statuses,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests


def no_argument() -> dict[str, Any]:
    return {}


async def coroutine(checkpoint: Checkpoint) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: ValidationConfig(None), "the validation function must be callable, found None"),  # type: ignore[arg-type]
        (lambda: ValidationConfig(coroutine), "coroutine is an async or a generator function"),  # type: ignore[arg-type]
        (lambda: ValidationConfig(no_argument), "takes () -> 'dict[str, Any]' and would be called"),  # type: ignore[arg-type]
        (
            lambda: ValidationConfig(squared, ValidationTaskConfig({"minus": 1})),
            "takes (checkpoint: 'Checkpoint', plus: 'float' = 0) -> 'dict[str, Any]' and would be "
            "called with checkpoint, minus: got an unexpected keyword argument 'minus'",
        ),
        (
            lambda: ValidationConfig(squared, {"plus": 1}),  # type: ignore[arg-type]
            "ValidationConfig.task_config must be a ValidationTaskConfig or None, found {'plus'",
        ),
        (
            lambda: ValidationConfig(squared, ray_remote_kwargs={"num_gpu": 1}),
            "ValidationConfig.ray_remote_kwargs={'num_gpu': 1}: Invalid option keyword num_gpu",
        ),
        (
            lambda: ValidationConfig(squared, ray_remote_kwargs={"num_returns": 2}),
            "ValidationConfig.ray_remote_kwargs must not contain num_returns",
        ),
        (
            lambda: ValidationConfig(squared, max_concurrent=0),
            "ValidationConfig.max_concurrent must be at least 1, found 0",
        ),
        (
            lambda: ValidationTaskConfig({"a": object()}),
            "ValidationTaskConfig.fn_kwargs must be JSON-serializable",
        ),
        (
            lambda: ValidationTaskConfig({"a": float("nan")}),
            "ValidationTaskConfig.fn_kwargs must be JSON-serializable",
        ),
        (
            lambda: ValidationTaskConfig([1]),  # type: ignore[arg-type]
            "ValidationTaskConfig.fn_kwargs must be a Mapping or None, found [1]",
        ),
        (
            lambda: ValidationTaskConfig({1: 1}),  # type: ignore[dict-item]
            "ValidationTaskConfig.fn_kwargs: a key must be a str, found 1",
        ),
        (lambda: ValidationTaskConfig(timeout_s=0), "timeout_s must be positive and finite"),
        (lambda: ValidationTaskConfig(timeout_s=math.inf), "timeout_s must be positive and finite"),
        (
            lambda: ValidationTaskConfig(timeout_s="1"),  # type: ignore[arg-type]
            "ValidationTaskConfig.timeout_s must be seconds, a timedelta or None, found '1' (str)",
        ),
        (
            lambda: DataParallelTrainer(save_with(), validation_config=squared),  # type: ignore[arg-type]
            "validation_config must be a ValidationConfig, found <function squared",
        ),
    ],
)
def test_validation_config_with_invalid_setting_raises(make: Callable[[], Any], error: str) -> None:
    with pytest.raises((TypeError, ValueError)) as raised:
        make()
    assert error in str(raised.value)


def test_validation_fn_kwargs_are_converted_to_json_types() -> None:
    assert ValidationTaskConfig({"size": (2, 3)}).fn_kwargs == {"size": [2, 3]}
    assert ValidationTaskConfig().fn_kwargs == {}


def test_validation_of_report_merges_arguments_with_defaults(tmp_path: Path) -> None:
    def train_func() -> None:
        save(0, False)
        save(1, True)
        save(2, ValidationTaskConfig())
        save(3, ValidationTaskConfig({"b": 3}))
        save(4, ValidationTaskConfig({"c": 4}, timeout_s=50))

    def validate(checkpoint: Checkpoint, **kwargs: float) -> dict[str, Any]:
        return kwargs

    defaults = ValidationTaskConfig({"a": 1, "b": 2}, timeout_s=60)
    result = fit(train_func, tmp_path, ValidationConfig(validate, defaults))
    assert [metrics for _, metrics in result.best_checkpoints] == [
        {"number": 0},
        {"number": 1, "a": 1, "b": 2},
        {"number": 2, "a": 1, "b": 2},
        {"number": 3, "a": 1, "b": 3},
        {"number": 4, "a": 1, "b": 2, "c": 4},
    ]
    validations = [manifest.validation for manifest in manifests(tmp_path)]
    timeouts = [validation and validation.timeout_s for validation in validations]
    assert timeouts == [None, 60, 60, 60, 50]


@pytest.mark.parametrize(
    ("arguments", "config", "error"),
    [
        (
            {"validation": True},
            ValidationConfig(squared),
            "ValueError: report(validation=...) needs a",
        ),
        (
            {"validation": True, "checkpoint": "."},
            None,
            "ValueError: report(validation=...) needs a validation function",
        ),
        (
            {"validation": "yes", "checkpoint": "."},
            ValidationConfig(squared),
            "TypeError: report(validation=...) takes True, False or a Validation",
        ),
    ],
)
def test_report_with_invalid_validation_names_the_user_line(
    tmp_path: Path, arguments: dict[str, Any], config: ValidationConfig | None, error: str
) -> None:
    def function() -> None:
        train.report({}, **arguments)

    with pytest.raises(WorkerGroupError) as raised:
        fit(function, tmp_path, config)
    assert str(raised.value).startswith(f"rank 0: {error}")
    assert f"{__file__}:" in raised.value.failures[0].location


def test_checkpoint_list_with_invalid_consistency_mode_raises(tmp_path: Path) -> None:
    with pytest.raises(WorkerGroupError, match="consistency_mode must be a CheckpointConsistency"):
        fit(lambda: statuses("VALIDATED"), tmp_path, None)


def test_validation_function_that_cannot_be_serialized_raises(tmp_path: Path) -> None:
    lock = threading.Lock()

    def validate(checkpoint: Checkpoint) -> dict[str, Any]:
        return {"lock": lock}

    with pytest.raises(TypeError, match=r"validation_config.fn cannot be sent(.|\n)*\.lock"):
        fit(save_with({}), tmp_path, ValidationConfig(validate))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("ray_cluster")
def test_validation_with_unavailable_resources_raises(tmp_path: Path) -> None:
    config = ValidationConfig(squared, ray_remote_kwargs={"num_gpus": 99, "resources": {"X": 1}})
    with pytest.raises(
        InsufficientResourcesError, match="one validation needs GPU=99, X=1, which no"
    ):
        fit(save_with({}), tmp_path, config, num_workers=1)
    assert not (tmp_path / "run").exists()


def test_restored_trainer_runs_validations(tmp_path: Path) -> None:
    fit(lambda: save(3), tmp_path, ValidationConfig(squared))
    trainer = DataParallelTrainer.restore(
        tmp_path / "run",
        train_loop_per_worker=save_with({}),
        run_config=RunConfig(name="run", storage_path=tmp_path, resume="must"),
    )
    assert trainer.fit().return_value == ["VALIDATED", "VALIDATED"]
