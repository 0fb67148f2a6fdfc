"""Tests of a Trainer in one process without Ray: resuming, the best model, and errors."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from transformers import EarlyStoppingCallback, TrainerCallback

from drawbar import train
from drawbar.train import CheckpointConfig, WorkerGroupError
from drawbar.train.runs import find_run
from drawbar.transformers import RayTrainReportCallback, prepare_trainer
from tests.stops import stop_run

RAY_VERSION = tuple(map(int, importlib.metadata.version("ray").split(".")[:2]))

cloudpickle.register_pickle_by_value(sys.modules[__name__])

pytestmark = pytest.mark.filterwarnings(
    "ignore:.*pin_memory.*:UserWarning",  # torch's loader, on a machine without an accelerator
    "ignore::DeprecationWarning:ray.data",  # it warns of itself
)

SAVES = {"save_strategy": "steps", "save_steps": 3, "max_steps": 6}


@pytest.fixture
def fit(runs: Any, tmp_path: Path) -> Callable[..., Any]:
    """Run a function in this process; gives the result."""

    def fit(function: Any, **options: Any) -> Any:
        return runs.fit(function, tmp_path, num_workers=0, max_failures=0, **options)

    return fit


class StepsBegun(TrainerCallback):
    """Notes from where each step begins."""

    def __init__(self) -> None:
        self.begun: list[int] = []

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.begun.append(state.global_step)


class StopAfterFirstStep(TrainerCallback):
    """Fails in the second step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            raise RuntimeError("stopped")


@pytest.mark.parametrize(
    ("argument", "begins"), [(None, 3), (True, 3), (False, 0)], ids=["nothing", "True", "False"]
)
def test_train_of_resumed_run_starts_from_expected_step(
    tiny: Any, runs: Any, fit: Callable[..., Any], tmp_path: Path, argument: Any, begins: int
) -> None:
    def function() -> list[int]:
        first = train.get_checkpoint() is None
        trainer = runs.on_ray(tiny.trainer(tmp_path / "output", **SAVES))
        steps = StepsBegun()
        trainer.add_callback(steps)
        if first:
            trainer.args.max_steps = 3
        trainer.train(resume_from_checkpoint=None if first else argument)
        return steps.begun

    assert fit(function).return_value[0] == 0
    assert fit(function).return_value[0] == begins


class StopRun(TrainerCallback):
    """Stops the run in its second step."""

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == 1:
            stop_run()


def test_stop_saves_at_end_of_step_and_resumes_there(tiny: Any, runs: Any, tmp_path: Path) -> None:
    def make_function(name: str, *callbacks: type[TrainerCallback]) -> Any:
        def function() -> list[float]:
            options = {**SAVES, "save_strategy": "no", "logging_steps": 1}
            trainer = runs.on_ray(tiny.trainer(tmp_path / name, **options))
            for callback in callbacks:
                trainer.add_callback(callback())
            trainer.train()
            return list(tiny.losses(trainer))

        return function

    def fit(name: str, *callbacks: type[TrainerCallback]) -> Any:
        function = make_function(name, *callbacks)
        return runs.fit(function, tmp_path / name, num_workers=0, max_failures=0)

    stopped = fit("stopped", StopRun)
    assert Path(stopped.checkpoint.path, "trainer_state.json").exists()
    assert stopped.metrics["step"] == 2
    losses = fit("whole").return_value
    assert fit("stopped").return_value == pytest.approx(losses)


def test_train_of_second_trainer_starts_from_scratch(
    tiny: Any, runs: Any, fit: Callable[..., Any], tmp_path: Path
) -> None:
    def function() -> list[int]:
        counts = []
        for _ in range(2):
            trainer = runs.on_ray(tiny.trainer(tmp_path / "output", **SAVES))
            trainer.train()
            counts.append(len(tiny.losses(trainer)))
        return counts

    result = fit(function)
    assert result.return_value == [6, 6]
    progress = find_run(result.path).progress
    assert progress is not None
    assert (progress.done, progress.total, progress.unit) == (6, 6, "steps")


EARLY_STOPPED = {
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,  # the loss decreases, so the second evaluation is not better
    "max_steps": -1,
    "num_train_epochs": 5,
}
BY_STEPS = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "steps", "save_steps": 2}
BY_EPOCHS = {"eval_strategy": "epoch", "save_strategy": "epoch"}


@pytest.fixture
def early_stopped(tiny: Any, runs: Any, tmp_path: Path) -> Callable[..., Any]:
    """Return a training function that stops early and returns the steps begun and the last step."""

    def make(patience: int = 1, **options: Any) -> Any:
        def function() -> tuple[list[int], int]:
            args = {**EARLY_STOPPED, "train_dataset": tiny.windows(12), **options}  # 3 steps
            trainer = runs.on_ray(tiny.trainer(tmp_path / "output", **args))
            steps = StepsBegun()
            trainer.add_callback(EarlyStoppingCallback(patience))
            trainer.add_callback(steps)
            trainer.train()
            trainer.evaluate()
            return steps.begun, trainer.state.global_step

        return function

    return make


@pytest.mark.parametrize(
    ("options", "stop"), [(BY_STEPS, 4), (BY_EPOCHS, 6)], ids=["in an epoch", "at its end"]
)
def test_fit_of_early_stopped_run_trains_no_further(
    fit: Callable[..., Any], early_stopped: Callable[..., Any], options: Any, stop: int
) -> None:
    first = fit(early_stopped(**options))
    second = fit(early_stopped(**options))
    assert first.return_value == (list(range(stop)), stop)
    assert second.return_value == ([], stop)
    assert [metrics["step"] for _, metrics in second.best_checkpoints] == [stop // 2, stop]
    assert second.metrics["eval_loss"] == pytest.approx(first.metrics["eval_loss"], abs=1e-6)
    assert second.metrics["loss"] == first.metrics["loss"]
    assert second.metrics.get("train_loss") != 0


def test_fit_of_run_that_stopped_after_its_newest_checkpoint_stops_at_the_same_step(
    fit: Callable[..., Any], early_stopped: Callable[..., Any]
) -> None:
    options = {**BY_STEPS, "eval_steps": 2, "save_steps": 4, "patience": 2}
    assert fit(early_stopped(**options)).return_value == (list(range(6)), 6)
    assert fit(early_stopped(**options)).return_value == ([4, 5], 6)


def test_checkpoint_of_early_stopped_run_given_to_another_run_trains_on(
    runs: Any, tmp_path: Path, fit: Callable[..., Any], early_stopped: Callable[..., Any]
) -> None:
    checkpoint = fit(early_stopped(**BY_STEPS)).checkpoint
    other = runs.fit(
        early_stopped(**BY_STEPS),
        tmp_path / "other",
        num_workers=0,
        max_failures=0,
        resume_from_checkpoint=checkpoint,
    )
    assert other.return_value[0][0] == 4


def test_fit_of_finished_run_that_ended_within_an_epoch_trains_no_further(
    tiny: Any, runs: Any, fit: Callable[..., Any], tmp_path: Path
) -> None:
    def function() -> list[int]:
        trainer = runs.on_ray(tiny.trainer(tmp_path / "output", **SAVES))
        steps = StepsBegun()
        trainer.add_callback(steps)
        trainer.train()
        return steps.begun

    first, second = fit(function), fit(function)
    assert first.return_value == list(range(6))
    assert second.return_value == []
    assert second.metrics["loss"] == first.metrics["loss"]
    assert "train_loss" not in second.metrics  # of no steps, it would be 0


def test_evaluate_after_training_keeps_the_metrics_of_training(
    tiny: Any, runs: Any, fit: Callable[..., Any], tmp_path: Path
) -> None:
    def function() -> dict[int, float]:
        trainer = runs.on_ray(tiny.trainer(tmp_path / "output", max_steps=3))
        trainer.evaluate()
        trainer.train()
        trainer.predict(trainer.eval_dataset)
        trainer.evaluate()
        losses: dict[int, float] = tiny.losses(trainer)
        return losses

    result = fit(function)
    assert result.metrics["loss"] == result.return_value[3]
    assert {"train_loss", "eval_loss", "learning_rate"} <= result.metrics.keys()
    assert result.metrics["step"] == 3
    first = result.metrics_dataframe.iloc[0]
    assert first["step"] == 0
    assert first["eval_loss"] > result.metrics["eval_loss"]


BEST = {
    "save_strategy": "best",
    "eval_strategy": "steps",
    "eval_steps": 2,
    "max_steps": 6,
    "metric_for_best_model": "eval_loss",
    "greater_is_better": True,  # the first evaluation is the best, since the loss goes down
    "load_best_model_at_end": True,
}


def test_load_best_model_at_end_loads_from_run(
    tiny: Any, runs: Any, fit: Callable[..., Any], tmp_path: Path
) -> None:
    def function() -> tuple[int, str, float]:
        trainer = runs.on_ray(tiny.trainer(tmp_path / "output", **BEST))
        trainer.train()
        loss = trainer.evaluate()["eval_loss"]
        return trainer.state.best_global_step, trainer.state.best_model_checkpoint, loss

    result = fit(function)
    step, path, loss = result.return_value
    assert step == 2
    assert path == result.checkpoint.path
    assert loss == pytest.approx(result.best_checkpoints[0][1]["eval_loss"], abs=1e-6)


def test_clean_keeps_best_checkpoint_of_trainer_after_resume(
    tiny: Any, runs: Any, fit: Callable[..., Any], tmp_path: Path
) -> None:
    for max_steps in (2, 6):
        saves = {**BEST, "save_strategy": "steps", "save_steps": 2, "max_steps": max_steps}

        def function(saves: dict[str, Any] = saves) -> None:
            runs.on_ray(tiny.trainer(tmp_path / "output", **saves)).train()

        result = fit(function)
    paths = {metrics["step"]: checkpoint.path for checkpoint, metrics in result.best_checkpoints}
    unused = find_run(result.path).find_unused_files(num_to_keep=1)
    assert [file.path for file in unused] == [paths[4]]


def test_load_best_model_at_end_after_resume_does_not_warn(
    tiny: Any,
    runs: Any,
    fit: Callable[..., Any],
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    paths = []
    for max_steps in (2, 4, 6):
        saves = {**BEST, "save_strategy": "steps", "save_steps": 2, "max_steps": max_steps}

        def function(saves: dict[str, Any] = saves) -> str | None:
            trainer = runs.on_ray(tiny.trainer(tmp_path / "output", **saves))
            trainer.train()
            path: str | None = trainer.state.best_model_checkpoint
            return path

        result = fit(function)
        paths.append(result.return_value)
    first = next(
        checkpoint for checkpoint, metrics in result.best_checkpoints if metrics["step"] == 2
    )
    assert paths == [first.path] * 3
    output = capfd.readouterr()
    assert "exist anymore" not in output.out + output.err


def test_load_best_model_at_end_of_deleted_checkpoint_raises(
    tiny: Any, runs: Any, fit: Callable[..., Any], tmp_path: Path
) -> None:
    def function() -> None:
        saves = {**BEST, "save_strategy": "steps", "save_steps": 2}
        runs.on_ray(tiny.trainer(tmp_path / "output", **saves)).train()

    with pytest.raises(WorkerGroupError, match=r"step 2.*checkpoint_score_attribute='eval_loss'"):
        fit(function, checkpoint_config=CheckpointConfig(num_to_keep=1))


def test_report_callback_without_prepared_trainer_raises(
    tiny: Any, fit: Callable[..., Any], tmp_path: Path
) -> None:
    def function() -> None:
        trainer = tiny.trainer(tmp_path / "output")
        trainer.add_callback(RayTrainReportCallback())
        trainer.train()

    with pytest.raises(WorkerGroupError, match=r"trainer = prepare_trainer\(trainer\)"):
        fit(function)


def test_report_callback_added_later_replaces_default(
    tiny: Any, runs: Any, fit: Callable[..., Any], tmp_path: Path
) -> None:
    def function() -> bool:
        trainer = runs.on_ray(tiny.trainer(tmp_path / "output", **SAVES))
        own = RayTrainReportCallback()
        trainer.add_callback(own)
        trainer.train()
        found = [c for c in trainer.callback_handler.callbacks if isinstance(c, type(own))]
        return found == [own]

    result = fit(function)
    assert result.return_value
    assert len(result.metrics_dataframe) == 7 + 2 + 1  # logs, saves, end


def test_train_from_checkpoint_without_trainer_state_raises(
    tiny: Any, runs: Any, fit: Callable[..., Any], tmp_path: Path
) -> None:
    def save_something_else() -> None:
        with train.checkpoint_dir() as path:
            (path / "own").write_text("mine")
            train.report({}, path)

    def function() -> None:
        runs.on_ray(tiny.trainer(tmp_path / "output", **SAVES)).train()

    fit(save_something_else)
    with pytest.raises(WorkerGroupError, match=r"no trainer_state.json"):
        fit(function, resume="must")


def test_prepare_trainer_with_save_total_limit_warns(
    tiny: Any, runs: Any, fit: Callable[..., Any], tmp_path: Path
) -> None:
    def function() -> None:
        runs.on_ray(tiny.trainer(tmp_path / "output", save_total_limit=2))

    with pytest.warns(UserWarning, match=r"CheckpointConfig\(num_to_keep=2\)"):
        fit(function)


def test_resume_with_other_number_of_steps_warns(
    tiny: Any, runs: Any, fit: Callable[..., Any], tmp_path: Path
) -> None:
    def function() -> None:
        # Not the batch size: before Transformers 5.2, it stays the one of the checkpoint.
        accumulated = 1 if train.get_checkpoint() is None else 2
        options = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 16}
        options["gradient_accumulation_steps"] = accumulated
        trainer = runs.on_ray(
            tiny.trainer(tmp_path / "output", save_strategy="steps", save_steps=1, **options)
        )
        if accumulated == 1:
            trainer.add_callback(StopAfterFirstStep())
        trainer.train()

    with pytest.raises(WorkerGroupError, match="stopped"):
        fit(function)
    with pytest.warns(UserWarning, match=r"1 epochs have 2 steps now, and had 4 before"):
        fit(function)


def test_metrics_that_are_arrays_or_sets_are_reported_as_lists(
    tiny: Any, runs: Any, fit: Callable[..., Any], tmp_path: Path
) -> None:
    def compute_metrics(prediction: object) -> dict[str, object]:
        tensors = {"each": [torch.ones(2), 1]}
        return {"array": np.arange(3), "tensor": torch.ones(2), "set": {2, 1}, "nested": tensors}

    def function() -> None:
        trainer = tiny.trainer(tmp_path / "output", max_steps=1)
        trainer.compute_metrics = compute_metrics
        runs.on_ray(trainer).train()
        trainer.evaluate()

    metrics = fit(function).metrics
    assert metrics["eval_array"] == [0, 1, 2]
    assert metrics["eval_tensor"] == [1.0, 1.0]
    assert metrics["eval_set"] == [1, 2]
    assert metrics["eval_nested"] == {"each": [[1.0, 1.0], 1]}


def test_prepare_trainer_with_save_only_model_raises(
    tiny: Any, runs: Any, fit: Callable[..., Any], tmp_path: Path
) -> None:
    def function() -> None:
        runs.on_ray(tiny.trainer(tmp_path / "output", save_only_model=True, **SAVES))

    with pytest.raises(WorkerGroupError, match=r"Remove save_only_model"):
        fit(function)


def test_prepare_trainer_outside_training_function_raises(tiny: Any, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="inside a training function"):
        prepare_trainer(tiny.trainer(tmp_path / "output"))


def test_prepare_trainer_of_other_type_raises(fit: Callable[..., Any]) -> None:
    def function() -> None:
        prepare_trainer("trainer")  # type: ignore[type-var]

    with pytest.raises(WorkerGroupError, match=r"needs a transformers.Trainer, found 'trainer'"):
        fit(function)


@pytest.mark.skipif(RAY_VERSION < (2, 54), reason="datasets of Ray Data need Ray 2.54")
def test_train_on_data_of_unknown_length_needs_max_steps(
    tiny: Any, ray_cluster: None, fit: Callable[..., Any], tmp_path: Path
) -> None:
    import ray

    def function() -> None:
        tiny.trainer(
            tmp_path / "output", train_dataset=train.get_dataset_shard("train"), max_steps=-1
        )

    lazy = ray.data.from_items(tiny.windows(8)).map(lambda row: row)
    with pytest.raises(WorkerGroupError, match="max_steps has to be specified"):
        fit(function, datasets={"train": lazy})


class Batches:
    """Batches that can be iterated several times, like the ones from `iter_torch_batches()`."""

    def __init__(self, windows: list[dict[str, list[int]]]) -> None:
        self.columns = {name: torch.tensor([row[name] for row in windows]) for name in windows[0]}

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from [self.columns] * 3


def test_train_on_iterable_of_batches_and_evaluate_on_lists(
    fit: Callable[..., Any], tiny: Any, tmp_path: Path
) -> None:
    def function() -> tuple[int, set[str]]:
        data = {"train_dataset": Batches(tiny.windows(4)), "eval_dataset": {"a": tiny.windows(4)}}
        trainer = prepare_trainer(tiny.trainer(tmp_path / "output", max_steps=4, **data))
        trainer.train()
        return trainer.state.global_step, set(trainer.evaluate())

    steps, metrics = fit(function).return_value
    assert steps == 4
    assert "eval_a_loss" in metrics
