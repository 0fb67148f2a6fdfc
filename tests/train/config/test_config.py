"""Tests of the config classes: validation, defaults, repr, and pickling."""

from __future__ import annotations

import dataclasses
import logging
import pickle
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
import pytest

from drawbar.lightgbm import LightGBMConfig
from drawbar.torch import TorchConfig
from drawbar.train import (
    BackendConfig,
    CheckpointConfig,
    DataConfig,
    FailureConfig,
    LoggingConfig,
    RunConfig,
    ScalingConfig,
    UserCallback,
    ValidationTaskConfig,
)
from drawbar.train.backend import at_least, parse_duration
from drawbar.xgboost import XGBoostConfig

if TYPE_CHECKING:
    from fractions import Fraction

WRONG_TYPES: list[tuple[type, str, Any, str]] = [
    (ScalingConfig, "num_workers", "2", "must be an int, found '2' \\(str\\)"),
    (ScalingConfig, "num_workers", 2.0, "must be an int, found 2.0 \\(float\\)"),
    (ScalingConfig, "num_workers", True, "must be an int, found True \\(bool\\)"),
    (ScalingConfig, "num_workers", (1, "4"), "must be an int, found '4' \\(str\\)"),
    (ScalingConfig, "num_workers", None, "must be an int, found None"),
    (ScalingConfig, "use_gpu", 1, "must be a bool, found 1 \\(int\\)"),
    (
        ScalingConfig,
        "resources_per_worker",
        [("CPU", 1)],
        "must be a Mapping, found \\[\\(",
    ),
    (ScalingConfig, "resources_per_worker", {"CPU": "4"}, "'CPU'\\] must be a number, found '4'"),
    (ScalingConfig, "resources_per_worker", {"CPU": True}, "must be a number, found True"),
    (ScalingConfig, "resources_per_worker", {4: 1}, "must be a str, found 4 \\(int\\)"),
    (ScalingConfig, "accelerator_type", 5, "must be a str or None, found 5 \\(int\\)"),
    (ScalingConfig, "label_selector", "zone=a", "must be a mapping, or a list .* found 'zone=a'"),
    (ScalingConfig, "label_selector", {"zone": 1}, "must have strings as values, found .*1"),
    (ScalingConfig, "label_selector", 3, "must be a mapping, or a list .* found 3"),
    (ScalingConfig, "label_selector", ["a"], "must be a mapping, or a list .* found \\['a'\\]"),
    (FailureConfig, "max_failures", "1", "must be an int, found '1'"),
    (FailureConfig, "max_failures", False, "must be an int, found False"),
    (FailureConfig, "max_preemption_failures", 1.0, "must be an int, found 1.0"),
    (FailureConfig, "max_startup_failures", None, "must be an int, found None"),
    (FailureConfig, "reuse_workers", "yes", "must be a bool, found 'yes' \\(str\\)"),
    (FailureConfig, "hang_timeout", "10s", "must be seconds, a timedelta or None, found '10s'"),
    (
        FailureConfig,
        "stall_warning_after",
        "10s",
        "must be seconds, a timedelta or None, found '10s'",
    ),
    (FailureConfig, "hang_timeout", True, "must be seconds, a timedelta or None, found True"),
    (CheckpointConfig, "num_to_keep", "all", "must be an int, found 'all'"),
    (CheckpointConfig, "checkpoint_score_attribute", 1, "must be a str or None, found 1"),
    (CheckpointConfig, "durable", 1, "must be a bool, found 1"),
    (CheckpointConfig, "memory_replication", 2, "must be a bool, found 2"),
    (LoggingConfig, "log_level", 20, "must be a str, found 20"),
    (RunConfig, "name", 5, "must be a str, found 5"),
    (RunConfig, "storage_path", 5, "must be .*, found 5 \\(int\\)"),
    (RunConfig, "storage_path", b"/tmp", "must be .*, found b'/tmp' \\(bytes\\)"),
    (RunConfig, "failure_config", {"max_failures": 1}, "must be a FailureConfig, found {'max_fail"),
    (RunConfig, "checkpoint_config", 3, "must be a CheckpointConfig, found 3"),
    (RunConfig, "logging_config", "INFO", "must be a LoggingConfig, found 'INFO'"),
    (
        RunConfig,
        "callbacks",
        UserCallback(),
        "must .*, found <drawbar.train.UserCallb",
    ),
    (RunConfig, "callbacks", [UserCallback], "instances of drawbar.train.UserCallback, found .<cl"),
    (RunConfig, "callbacks", 5, "must .*, found 5"),
    (RunConfig, "worker_runtime_env", "env.yaml", "must be a Mapping or None, found 'env.yaml'"),
    (RunConfig, "forward_env", "MY_*", "must be a list .* found 'MY_\\*'"),
    (RunConfig, "forward_env", 5, "must be a list of names or patterns .* found 5"),
    (RunConfig, "forward_env", [5], "must be a list of names or patterns .* found \\[5\\]"),
    (DataConfig, "datasets_to_split", "train", "must be \"all\" or a list .* found 'train'"),
    (DataConfig, "datasets_to_split", [1], 'must be "all" or a list of dataset names'),
    (DataConfig, "datasets_to_split", None, 'must be "all" or a list .* found None'),
    (DataConfig, "enable_shard_locality", 1, "must be a bool, found 1"),
]

WRONG_VALUES: list[tuple[type, str, Any, str]] = [
    (ScalingConfig, "num_workers", -1, "must be at least 0, found -1"),
    (ScalingConfig, "num_workers", (1, 2, 3), r"must be an int, or \(low, high\).*\(1, 2, 3\)"),
    (ScalingConfig, "num_workers", (0, 2), r"num_workers\[0\] must be at least 1, found 0"),
    (ScalingConfig, "num_workers", (4, 2), r"num_workers\[1\] must be at least 4, found 2"),
    (
        ScalingConfig,
        "resources_per_worker",
        {"CPU": -1},
        "'CPU'] must be finite and not negative, found -1",
    ),
    (ScalingConfig, "resources_per_worker", {"CPU": float("nan")}, "must be finite .* found nan"),
    (ScalingConfig, "resources_per_worker", {"CPU": float("inf")}, "must be finite .* found inf"),
    (ScalingConfig, "resources_per_worker", {"GPU": 1}, "use_gpu=False; set use_gpu=True"),
    (ScalingConfig, "placement_strategy", "PACKED", "must be one of 'PACK', .* found 'PACKED'"),
    (
        ScalingConfig,
        "placement_strategy",
        np.array([1, 2]),
        "must be one of 'PACK', .* found array",
    ),
    (ScalingConfig, "placement_strategy", None, "must be one of 'PACK', .* found None"),
    (ScalingConfig, "label_selector", [{}, {}], "lists 2 selectors for num_workers=1; give one"),
    (FailureConfig, "max_failures", -2, "must be at least -1, found -2"),
    (FailureConfig, "max_preemption_failures", -2, "must be at least -1, found -2"),
    (FailureConfig, "max_startup_failures", -2, "must be at least -1, found -2"),
    (FailureConfig, "hang_timeout", 0, "must be positive and finite, found 0; None waits"),
    (FailureConfig, "hang_timeout", timedelta.max, "positive and finite, found 999999999 days"),
    (FailureConfig, "hang_timeout", timedelta(seconds=-1), "positive and finite, found -1 day"),
    (FailureConfig, "hang_timeout", float("nan"), "positive and finite, found nan; None"),
    (FailureConfig, "hang_timeout", float("inf"), "positive and finite, found inf; None"),
    (CheckpointConfig, "num_to_keep", 0, "must be at least 1, found 0"),
    (CheckpointConfig, "checkpoint_score_order", "lowest", "one of 'max', 'min', found 'lowest'"),
    (LoggingConfig, "log_level", "LOUD", "must be one of 'DEBUG', .* found 'LOUD'"),
    (ScalingConfig, "resources_per_worker", {"cpu": 1}, "is not a Ray resource; write 'CPU'"),
    (ScalingConfig, "resources_per_worker", {"TPU": 4}, "use_tpu=False; set use_tpu=True"),
    (ScalingConfig, "trainer_resources", {"CPU": 1}, "must be None, found {'CPU': 1}"),
    (
        ScalingConfig,
        "topology",
        "2x2",
        "='2x2' describes a TPU slice; set use_tpu=True",
    ),
    (RunConfig, "resume", "yes", "must be one of 'auto', 'never', 'must', found 'yes'"),
    (RunConfig, "resume", True, "must be one of 'auto', 'never', 'must', found True"),
    (RunConfig, "storage_path", "", "must not be empty"),
    (RunConfig, "name", "", "'' is not a valid directory name"),
    (RunConfig, "name", "  ", "'  ' is not a valid directory name"),
    (RunConfig, "name", ".", "'.' is not a valid directory name"),
    (RunConfig, "name", "a\nb", r"'a\\nb' is not a valid directory name"),
    (RunConfig, "name", "ä" * 128, "'ä{20}...' has 256 bytes; a directory name has at most 255"),
    (RunConfig, "name", "/tmp/a", "'/tmp/a' would leave the storage path; give a plain name"),
    (RunConfig, "name", "../a", "'../a' would leave the storage path; give a plain name"),
    (RunConfig, "name", "a/../../b", "would leave the storage path; give a plain name"),
]


@pytest.mark.parametrize(("config", "field", "value", "message"), WRONG_TYPES)
def test_config_with_wrong_type_raises_with_field_and_value(
    config: type, field: str, value: Any, message: str
) -> None:
    with pytest.raises(TypeError, match=f"{config.__name__}.{field}.*{message}"):
        config(**{field: value})


@pytest.mark.parametrize(("config", "field", "value", "message"), WRONG_VALUES)
def test_config_with_wrong_value_raises_with_field_and_value(
    config: type, field: str, value: Any, message: str
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        config(**{field: value})
    assert str(raised.value).startswith(config.__name__)
    assert field in str(raised.value)


def test_scaling_config_with_gpu_and_tpu_raises() -> None:
    with pytest.raises(ValueError, match="use_gpu=True and use_tpu=True"):
        ScalingConfig(use_gpu=True, use_tpu=True)


def test_scaling_config_use_gpu_with_zero_gpus_raises() -> None:
    with pytest.raises(ValueError, match="use_gpu=True and resources_per_worker\\['GPU'\\]=0; set"):
        ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 0})


@pytest.mark.parametrize(
    "config", [ScalingConfig, FailureConfig, CheckpointConfig, LoggingConfig, RunConfig, DataConfig]
)
def test_config_is_frozen_and_pickles(config: Any) -> None:
    made = config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, dataclasses.fields(config)[0].name, 1)
    assert pickle.loads(pickle.dumps(made)) == made


@pytest.mark.parametrize(
    ("config", "shown"),
    [
        (ScalingConfig(), "ScalingConfig()"),
        (ScalingConfig(num_workers=2, use_gpu=True), "ScalingConfig(num_workers=2, use_gpu=True)"),
        (ScalingConfig(num_workers=(1, 4)), "ScalingConfig(num_workers=(1, 4))"),
        (FailureConfig(max_failures=-1), "FailureConfig(max_failures=-1)"),
        (CheckpointConfig(num_to_keep=1), "CheckpointConfig(num_to_keep=1)"),
        (LoggingConfig(log_level="error"), "LoggingConfig(log_level='error')"),
        (RunConfig(), "RunConfig()"),
        (RunConfig(name="a", resume="must"), "RunConfig(name='a', resume='must')"),
        (
            RunConfig(failure_config=FailureConfig(max_failures=1)),
            "RunConfig(failure_config=FailureConfig(max_failures=1))",
        ),
        (DataConfig(datasets_to_split="all"), "DataConfig(datasets_to_split='all')"),
    ],
)
def test_config_repr_shows_only_changed_fields(config: object, shown: str) -> None:
    assert repr(config) == shown


@pytest.mark.parametrize(
    ("config", "bundle"),
    [
        (ScalingConfig(), {"CPU": 1.0}),
        (ScalingConfig(use_gpu=True), {"GPU": 1.0}),
        (ScalingConfig(use_gpu=True, resources_per_worker={"CPU": 4}), {"CPU": 4.0, "GPU": 1.0}),
        (ScalingConfig(use_gpu=True, resources_per_worker={"GPU": 0.5}), {"GPU": 0.5}),
        (ScalingConfig(resources_per_worker={"CPU": 0, "disk": 2}), {"disk": 2.0}),
        (ScalingConfig(resources_per_worker={}), {}),
        (ScalingConfig(use_tpu=True), {"TPU": 1.0}),
        (
            ScalingConfig(use_gpu=True, accelerator_type="A100"),
            {"GPU": 1.0, "accelerator_type:A100": 0.001},
        ),
    ],
)
def test_scaling_config_bundle_of_one_worker(
    config: ScalingConfig, bundle: dict[str, float]
) -> None:
    assert config.bundle == bundle
    assert config.num_cpus_per_worker == bundle.get("CPU", 0)
    assert config.num_gpus_per_worker == bundle.get("GPU", 0)


@pytest.mark.parametrize(
    ("num_workers", "low", "high", "elastic"),
    [(3, 3, 3, False), (0, 0, 0, False), ((2, 4), 2, 4, True), ([1, 2], 1, 2, True)],
)
def test_scaling_config_elastic_has_min_and_max_workers(
    num_workers: Any, low: int, high: int, elastic: Any
) -> None:
    config = ScalingConfig(num_workers=num_workers)
    assert (config.min_workers, config.max_workers) == (low, high)
    assert config.elasticity_enabled is elastic
    assert config.total_resources == {"CPU": max(high, 1)}


def test_scaling_config_label_selector_applies_to_all_or_each_worker() -> None:
    assert ScalingConfig(num_workers=2, label_selector={"zone": "a"}).label_selectors == [
        {"zone": "a"},
        {"zone": "a"},
    ]
    each = [{"zone": "a"}, {"zone": "b"}]
    assert ScalingConfig(num_workers=2, label_selector=each).label_selectors == each
    assert ScalingConfig(num_workers=2).label_selectors == []


@pytest.mark.parametrize("made", [TorchConfig, XGBoostConfig, LightGBMConfig, ValidationTaskConfig])
def test_duration_accepts_seconds_or_timedelta(made: Callable[..., Any]) -> None:
    assert made(timeout_s=90).timeout_s == made(timeout_s=timedelta(minutes=1.5)).timeout_s == 90
    with pytest.raises(ValueError, match="timeout_s must be positive and finite, found 1e\\+300"):
        made(timeout_s=1e300)


def test_failure_config_converts_seconds_to_timedelta() -> None:
    assert FailureConfig(hang_timeout=1.5).hang_timeout == timedelta(seconds=1.5)


def test_run_config_none_selects_defaults() -> None:
    nothing: Any = None
    config = RunConfig(
        failure_config=nothing, checkpoint_config=nothing, logging_config=nothing, callbacks=nothing
    )
    assert config == RunConfig()


def test_run_config_storage_path_accepts_str_and_path(tmp_path: Path) -> None:
    class Mount:
        def __fspath__(self) -> str:
            return str(tmp_path)

    assert RunConfig(storage_path=Mount()).storage_path is not None
    assert RunConfig(storage_path=str(tmp_path)).storage_path == str(tmp_path)


def test_logging_config_accepts_levels_in_any_case() -> None:
    assert LoggingConfig(log_level="warning").level_number == logging.WARNING


@pytest.mark.parametrize(
    ("split", "train", "valid"),
    [("all", True, True), (("train",), True, False), ([], False, False), (["valid"], False, True)],
)
def test_data_config_is_split_by_datasets_to_split(split: Any, train: bool, valid: bool) -> None:
    config = DataConfig(datasets_to_split=split)
    assert (config.is_split("train"), config.is_split("valid")) == (train, valid)


def test_run_config_with_ray_tune_callback_raises_with_replacement() -> None:
    module = {"__module__": "ray.tune.integration.ray_train"}
    callback = type("TuneReportCallback", (), module)()  # the real one wants to be in a trial
    with pytest.raises(TypeError, match=r"drawbar\.tune\.TuneReportCallback reports to Ray Tune"):
        RunConfig(callbacks=[callback])


@dataclasses.dataclass(frozen=True)
class CustomConfig(BackendConfig):
    mode: Literal["fast", "exact"] | None = None
    ratio: float = 0.5
    num_threads: Annotated[int, at_least(1)] = 8
    timeout_s: Annotated[float | timedelta | None, parse_duration] = 60
    hosts: list[str] | str | None = None
    scale: Fraction | None = None  # not checked, because it is not importable at run time


@dataclasses.dataclass(frozen=True)
class DerivedConfig(CustomConfig):
    num_threads: Annotated[int, at_least(4)] = 8


def test_backend_config_fields_are_checked_against_annotations() -> None:
    anything: Any = "1/2"
    config = CustomConfig(ratio=1, timeout_s=timedelta(minutes=1), hosts="a", scale=anything)
    assert (config.ratio, config.timeout_s, str(config.scale)) == (1, 60, "1/2")
    assert CustomConfig(mode="fast", timeout_s=None).timeout_s is None
    assert dataclasses.replace(config, mode="exact").timeout_s == 60


@pytest.mark.parametrize(
    ("config", "field", "value", "error", "message"),
    [
        (CustomConfig, "mode", "slow", ValueError, "one of 'fast', 'exact', None, found 'slow'"),
        (CustomConfig, "ratio", "half", TypeError, "must be a float, found 'half'"),
        (CustomConfig, "ratio", True, TypeError, "must be a float, found True"),
        (CustomConfig, "num_threads", 0, ValueError, "must be at least 1, found 0"),
        (CustomConfig, "timeout_s", 0, ValueError, "must be positive and finite, found 0"),
        (CustomConfig, "hosts", 3, TypeError, "must be a list, str, or None, found 3"),
        (DerivedConfig, "num_threads", 2, ValueError, "must be at least 4, found 2"),
    ],
)
def test_backend_config_with_wrong_value_raises_with_field_and_value(
    config: type, field: str, value: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=rf"^{config.__name__}\.{field} .*{message}"):
        config(**{field: value})
