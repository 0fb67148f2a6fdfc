"""Tests of trials without Ray: choice of the run, parameters, and resources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ray import tune

from drawbar.torch import TorchTrainer
from drawbar.train import (
    CheckpointConfig,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    ValidationConfig,
    get_context,
)
from drawbar.train._worker_group.placement import find_free_bundles
from drawbar.train.testing import run_in_threads
from drawbar.tune import TuneReportCallback, as_placement_group_factory, as_trainable
from drawbar.tune._result_files import truncate_after
from drawbar.tune._trainable import TuneCheckpoint
from drawbar.tune._trial import (
    apply_parameters,
    choose_run_name,
    sorted_run_names,
    validate_param_space,
)
from drawbar.xgboost import XGBoostTrainer
from tests._ray_compat import make_tune_checkpoint_manager

EARLIER, NEWEST, OTHER = "a/run_1/checkpoint_000002", "a/run_1/checkpoint_000003", "b/run_0/c"


def function(config: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("found", "start_from", "newest", "expected"),
    [
        ([], None, None, "run_0"),
        ([], OTHER, None, "run_0"),
        (["run_1", "mine", "run_0"], None, None, "run_1"),
        (["run_9", "run_10"], None, NEWEST, "run_11"),
        (["run_0", "run_1"], NEWEST, NEWEST, "run_1"),
        (["run_0", "run_1"], EARLIER, NEWEST, "run_2"),
        (["run_0", "run_1"], OTHER, NEWEST, "run_2"),
    ],
)
def test_choose_run_name_depends_on_start_checkpoint(
    found: list[str], start_from: str | None, newest: str | None, expected: str
) -> None:
    assert (
        choose_run_name(sorted_run_names(found), start_from, latest_checkpoint=newest) == expected
    )


@pytest.mark.parametrize(("after", "left"), [(0, 0), (1, 1), (2, 2), (9, 2)])
def test_truncate_after_removes_later_results(tmp_path: Path, after: int, left: int) -> None:
    """Written as Tune's loggers write; the last line as a killed driver leaves it."""
    lines = [f'{{"loss": NaN, "training_iteration": {number}}}\n' for number in (1, 2, 3)]
    (tmp_path / "result.json").write_text("".join(lines)[:-3])
    rows = ["training_iteration,said\r\n", '1,"two\nlines"\r\n', "2,\r\n", ""]
    (tmp_path / "progress.csv").write_bytes("".join(rows).encode())
    for name in ("result.json", "progress.csv"):
        truncate_after(tmp_path / name, after)
    assert (tmp_path / "result.json").read_text() == "".join(lines[:left])
    expected = "".join(rows[: left + 1]) if left else ""  # the logger writes the header again
    assert (tmp_path / "progress.csv").read_bytes() == expected.encode()


def test_merge_parameters_changes_dict_keys_and_config_fields() -> None:
    trainer = TorchTrainer(
        function,
        train_loop_config={"lr": 1, "layers": 2},
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        metadata={"team": "a"},
    )
    config = {"train_loop_config": {"lr": 3}, "scaling_config": {"num_workers": 4}}
    changed = apply_parameters(trainer, config, metadata={"team": "b"})
    assert isinstance(changed, TorchTrainer)
    assert changed.train_loop_config == {"lr": 3, "layers": 2}
    expected = ScalingConfig(num_workers=4, placement_strategy="SPREAD")
    assert (changed.scaling_config, changed.metadata) == (expected, {"team": "b"})
    assert trainer.train_loop_config == {"lr": 1, "layers": 2}


def test_apply_parameters_of_training_spec() -> None:
    datasets: dict[str, Any] = {"train": lambda: None}  # not called before the run
    trainer = XGBoostTrainer(
        params={"eta": 0.1, "max_depth": 2}, label_column="y", datasets=datasets
    )
    tuned = apply_parameters(trainer, {"params": {"max_depth": 5}, "num_boost_round": 7})
    fit: Any = tuned.train_loop_per_worker
    assert (fit.params, fit.num_boost_round) == ({"eta": 0.1, "max_depth": 5}, 7)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lr": 1}, r"not an argument of DataParallel.* 'train_loop_config': \{'lr': ...\}"),
        ({"run_config": {}}, "each trial stores its run in the trial's directory"),
    ],
)
def test_validate_param_space_of_unknown_argument_raises(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        validate_param_space(DataParallelTrainer, config)


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


@pytest.mark.parametrize(
    ("bundles", "taken", "count", "expected"),
    [
        ([{"CPU": 1}, {"CPU": 1}], {}, 2, [0, 1]),
        ([{"CPU": 1}, {"CPU": 1}, {"CPU": 2}], {"CPU": 1}, 2, [1, 2]),
        ([{"CPU": 1}], {"CPU": 1}, 1, []),
        ([{"CPU": 4}], {"CPU": 1}, 2, [0, 0]),
        ([{"GPU": 1}, {"CPU": 3}], {}, 8, [1, 1, 1]),
    ],
)
def test_placement_group_factory_bundles_fit_workers(
    bundles: list[dict[str, float]], taken: dict[str, float], count: int, expected: list[int]
) -> None:
    assert find_free_bundles(bundles, taken, {"CPU": 1}, count) == expected


def test_tune_checkpoint_registered_twice_is_not_deleted(tmp_path: Path) -> None:
    """As when a trial is paused: Tune's own results would have `num_to_keep=1` delete it."""
    manager = make_tune_checkpoint_manager(tune.CheckpointConfig(num_to_keep=1))
    newest = tmp_path / "checkpoint_1"
    for name in ("checkpoint_0", "checkpoint_1", "checkpoint_1"):
        (tmp_path / name).mkdir(exist_ok=True)
        manager.register_checkpoint(TuneCheckpoint(tune.Checkpoint(str(tmp_path / name)), {}))
    assert list(tmp_path.iterdir()) == [newest]


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
