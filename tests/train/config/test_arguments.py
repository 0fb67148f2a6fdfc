"""Tests of ArgumentErrors: unknown arguments raise an error with a suggestion."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path
from typing import Any

import pytest

from drawbar.torch import TorchConfig, TorchTrainer
from drawbar.train import (
    CheckpointConfig,
    DataConfig,
    DataParallelTrainer,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
)
from drawbar.xgboost import XGBoostTrainer

UNKNOWN: list[tuple[Any, str, str]] = [
    (ScalingConfig, "num_worker", "did you mean 'num_workers'?"),
    (RunConfig, "storagepath", "did you mean 'storage_path'?"),
    (RunConfig, "verbose", "logging_config=LoggingConfig"),
    (RunConfig, "sync_config", "leave it out"),
    (RunConfig, "stop", "return from the training function"),
    (RunConfig, "progress_reporter", "the console shows the progress"),
    (RunConfig, "log_to_file", "<run>/logs"),
    (FailureConfig, "fail_fast", "max_failures=0"),
    (CheckpointConfig, "checkpoint_frequency", "report\\(checkpoint=...\\)"),
    (CheckpointConfig, "checkpoint_at_end", "report\\(checkpoint=...\\)"),
    (LoggingConfig, "level", "did you mean 'log_level'?"),
    (DataConfig, "dataset_to_split", "did you mean 'datasets_to_split'?"),
    (ValidationConfig, "function", "it takes fn, task_config"),
    (TorchConfig, "timeout", "did you mean 'timeout_s'?"),
    (DataParallelTrainer, "scalingconfig", "did you mean 'scaling_config'?"),
    (TorchTrainer, "train_loop_configs", "did you mean 'train_loop_config'?"),
    (TorchTrainer, "train_func", "did you mean 'train_loop_per_worker'?"),
    (TorchTrainer, "backend_config", "it takes .*torch_config"),
    (TorchTrainer, "data_config", "did you mean 'dataset_config'?"),
    (DataParallelTrainer, "torch_config", "it takes .*backend_config"),
    (XGBoostTrainer, "label_colum", "did you mean 'label_column'?"),
]


@pytest.mark.parametrize(("kind", "name", "advice"), UNKNOWN)
def test_unknown_argument_raises_with_suggestion(kind: Any, name: str, advice: str) -> None:
    with pytest.raises(TypeError, match=f"{kind.__name__} takes no {name}=: .*{advice}"):
        kind(**{name: 1})


def test_validation_config_options_without_mapping_raise_with_name() -> None:
    options: Any = 3
    with pytest.raises(TypeError, match=r"\.ray_remote_kwargs must be a Mapping or None"):
        ValidationConfig(lambda checkpoint: {}, ray_remote_kwargs=options)


def test_positional_arguments_follow_ray_train_order(tmp_path: Path) -> None:
    scaling = ScalingConfig(None, 2, True, {"CPU": 1}, "SPREAD", "A100", {"zone": "a"})
    assert (scaling.num_workers, scaling.placement_strategy) == (2, "SPREAD")
    failures = FailureConfig(3)
    checkpoints = CheckpointConfig(2, "loss", "min")
    run = RunConfig("run", tmp_path, None, failures, checkpoints, [], {}, LoggingConfig("ERROR"))
    assert (run.name, run.failure_config.max_failures) == ("run", 3)
    assert DataConfig(["train"], None, False) == DataConfig(
        datasets_to_split=["train"], enable_shard_locality=False
    )
    assert dataclasses.replace(failures, reuse_workers=False).max_failures == 3


def test_failure_config_accepts_controller_failure_limit() -> None:
    assert FailureConfig(controller_failure_limit=5) == FailureConfig(max_startup_failures=5)
    with pytest.raises(ValueError, match="max_startup_failures must be at least -1, found -2"):
        FailureConfig(controller_failure_limit=-2)


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [
        (FailureConfig, "relax_collectives_on_preemption", True),
        (FailureConfig, "preemption_grace_s", 10),
        (ScalingConfig, "elastic_resize_monitor_interval_s", 10),
    ],
)
def test_ignored_argument_warns(kind: Any, name: str, value: Any) -> None:
    with pytest.warns(UserWarning, match=f"{name}.* ha(s|ve) no effect") as warned:
        kind(**{name: value})
    assert warned[0].filename == __file__


def test_config_signature_shows_init_arguments() -> None:
    assert list(inspect.signature(LoggingConfig).parameters) == ["log_level"]
    assert "scaling_config" in inspect.signature(TorchTrainer).parameters


def test_config_subclass_accepts_additional_arguments() -> None:
    class Mine(DataConfig):
        def __init__(self, rows: int) -> None:
            super().__init__(datasets_to_split="all")
            self.rows = rows

    assert Mine(rows=3).rows == 3
    with pytest.raises(TypeError, match=r"Mine takes no row=: did you mean 'rows'\?"):
        Mine(row=3)  # type: ignore[call-arg]
