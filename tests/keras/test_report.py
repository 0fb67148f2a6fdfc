"""Reports and validation of the callback, without Ray and with a fake model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from drawbar.keras import ReportCheckpointCallback, load_state
from drawbar.train import (
    Checkpoint,
    FailureConfig,
    Result,
    RunConfig,
    TrainingFailedError,
    get_checkpoint,
    get_context,
)
from drawbar.train.testing import run_in_threads
from tests.stops import stop_run


class Model:
    """Attributes of a model that the callback uses."""

    def save(self, path: str) -> None:
        Path(path).write_text("model")

    def save_weights(self, path: str) -> None:
        Path(path).write_text("weights")

    def load_weights(self, path: str) -> None:
        assert Path(path).read_text() == "model"


class Counting:
    """Another callback, with a counter that training changes and a setting that it does not."""

    def __init__(self, patience: int) -> None:
        self.patience = patience
        self.wait = 0


def run(callback: ReportCheckpointCallback, config: RunConfig, epochs: int = 2) -> Result:
    def function() -> None:
        callback.set_model(Model())
        callback.on_train_begin()
        for epoch in range(epochs):
            callback.on_epoch_begin(epoch)
            for batch in range(4):
                callback.on_train_batch_end(batch, {"loss": 4.0 - batch})
            callback.on_epoch_end(epoch, {"loss": 1.0 - epoch, "accuracy": 0.5})
        callback.on_train_end({})

    return run_in_threads(function, num_workers=1, run_config=config)


def read_progress(checkpoint: Checkpoint | None) -> dict[str, Any]:
    assert checkpoint is not None
    with checkpoint.as_directory() as directory:
        progress: dict[str, Any] = json.loads(Path(directory, "progress.json").read_text())
    return progress


def reported(result: Result) -> list[dict[str, Any]]:
    rows = result.metrics_dataframe.query("rank == 0")
    names = [name for name in rows if name in ("loss", "accuracy", "error")]
    return [{name: row[name] for name in names} for _, row in rows.iterrows()]


def test_report_callback_reports_and_saves_epochs(run_config: RunConfig) -> None:
    result = run(ReportCheckpointCallback(save_weights=True), run_config)
    assert reported(result) == [{"loss": 1.0, "accuracy": 0.5}, {"loss": 0.0, "accuracy": 0.5}]
    assert result.checkpoint is not None
    with result.checkpoint.as_directory() as folder:
        assert sorted(each.name for each in Path(folder).iterdir() if each.name[0] not in "._") == [
            "model.keras",
            "model.weights.h5",
            "progress.json",
        ]
        assert json.loads(Path(folder, "progress.json").read_text())["epochs"] == 2


def test_stop_saves_before_next_batch(run_config: RunConfig) -> None:
    def function() -> None:
        callback = ReportCheckpointCallback()
        callback.set_model(Model())
        callback.on_train_begin()
        callback.on_epoch_begin(1)
        for batch in range(4):
            callback.on_train_batch_begin(batch)
            if batch == 2:
                stop_run()

    result = run_in_threads(function, num_workers=1, run_config=run_config)
    assert result.checkpoint is not None
    progress = json.loads(Path(result.checkpoint.path, "progress.json").read_text())
    assert (progress["epochs"], progress["batches"]) == (1, 3)


def test_stop_in_epochs_of_one_batch_saves_at_the_end_of_the_epoch(run_config: RunConfig) -> None:
    def function() -> None:
        callback = ReportCheckpointCallback(checkpoint_on={"epoch_end": 10})
        callback.set_model(Model())
        callback.on_train_begin()
        for epoch in range(4):
            callback.on_epoch_begin(epoch)
            callback.on_train_batch_begin(0)
            if epoch == 1:
                stop_run()
            callback.on_epoch_end(epoch, {"loss": 1.0})

    result = run_in_threads(function, num_workers=1, run_config=run_config)
    assert result.checkpoint is not None
    progress = json.loads(Path(result.checkpoint.path, "progress.json").read_text())
    assert (progress["epochs"], progress["batches"]) == (2, 0)


def test_restart_without_load_state_warns(tmp_path: Path) -> None:
    def function() -> None:
        callback = ReportCheckpointCallback()
        callback.set_model(Model())
        callback.on_train_begin()
        for epoch in range(2):
            callback.on_epoch_begin(epoch)
            callback.on_epoch_end(epoch, {"loss": 1.0})
            if get_context().get_attempt() == 0:
                raise ValueError("once")

    config = RunConfig(storage_path=tmp_path, failure_config=FailureConfig(max_failures=1))
    with pytest.warns(UserWarning, match="starts at epoch 0, but the checkpoint has 1 epochs"):
        run_in_threads(function, num_workers=1, run_config=config)


def test_report_callback_selects_events_metrics_and_interval(run_config: RunConfig) -> None:
    callback = ReportCheckpointCallback(
        checkpoint_on=[], report_metrics_on={"train_batch_end": 3}, metrics={"error": "loss"}
    )
    result = run(callback, run_config)
    assert reported(result) == [{"error": 2.0}, {"error": 3.0}]  # the third batch, and the sixth
    assert result.checkpoint is None


def test_report_callback_restores_stateful_callbacks(run_config: RunConfig) -> None:
    other = Counting(patience=3)

    def function() -> tuple[int, int]:
        callback = ReportCheckpointCallback(stateful_callbacks=[other])
        callback.set_model(Model())
        callback.on_train_begin()
        if get_checkpoint() is None:
            other.wait = 2
            callback.on_epoch_end(0, {"loss": 1.0})
            other.wait, other.patience = 0, 5  # created again with another setting
            callback.on_train_begin()
        return other.wait, other.patience

    result = run_in_threads(function, num_workers=1, run_config=run_config)
    assert result.return_values == [(2, 5)]


def test_evaluate_outside_fit_saves_progress_of_loaded_checkpoint(run_config: RunConfig) -> None:
    other = Counting(patience=3)

    def evaluate(callback: ReportCheckpointCallback, model: Model) -> dict[str, Any]:
        callback.set_model(model)
        callback.set_params({"steps": 2, "epochs": 1})  # of the test data
        callback.on_test_end({"loss": 2.0})
        return read_progress(get_checkpoint())

    def function() -> None:
        model = Model()
        options: Any = {"stateful_callbacks": [other]}
        before = ReportCheckpointCallback("test_end", **options)
        assert evaluate(before, model)["epochs"] == 0
        callback = ReportCheckpointCallback({"train_batch_end": 3}, **options)
        callback.set_model(model)
        callback.set_params({"steps": 8, "epochs": 1})
        callback.on_train_begin()
        callback.on_epoch_begin(4)
        other.wait = 2
        for batch in range(3):
            callback.on_train_batch_end(batch, {"loss": 1.0})
        trained = read_progress(get_checkpoint())
        assert (trained["epochs"], trained["batches"], trained["callbacks"]) == (
            4,
            3,
            [{"wait": 2}],
        )

        resumed = Model()  # as after a restart
        assert load_state(resumed) == 4
        saved = evaluate(ReportCheckpointCallback("test_end", **options), resumed)
        assert saved["events"].pop("test_end") == trained["events"].pop("test_end") + 1
        assert saved == trained
        other.wait = 0
        callback = ReportCheckpointCallback("test_end", **options)
        callback.set_model(resumed)
        callback.on_train_begin()
        assert other.wait == 2
        callback.on_epoch_end(4, {"loss": 1.0})
        after = evaluate(ReportCheckpointCallback("test_end"), resumed)
        assert (after["epochs"], after["batches"]) == (5, 0)

    run_in_threads(function, num_workers=1, run_config=run_config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint_on": "epoch_stop"}, "unknown event 'epoch_stop'. Known events: epoch_begin"),
        ({"report_metrics_on": ["epochs"]}, "report_metrics_on has unknown event 'epochs'"),
        ({"checkpoint_on": {"epoch_end": 0}}, "must be a positive integer, found 0"),
    ],
)
def test_report_callback_with_unknown_event_raises(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReportCheckpointCallback(**arguments)


def test_report_callback_with_missing_metric_raises(run_config: RunConfig) -> None:
    callback = ReportCheckpointCallback(metrics=["val_loss"])
    with pytest.raises(TrainingFailedError, match=r"\['val_loss'\], which are not in the logs"):
        run(callback, run_config)


def test_report_callback_outside_run_warns_once() -> None:
    callback = ReportCheckpointCallback()
    with pytest.warns(UserWarning, match="has no effect outside a Drawbar run"):
        callback.on_epoch_end(0, {"loss": 1.0})
    callback.on_epoch_end(1, {"loss": 1.0})  # a second warning would be an error


def test_load_state_of_other_checkpoint_raises(run_config: RunConfig) -> None:
    from drawbar import train

    def function() -> None:
        with train.checkpoint_dir() as path:
            (path / "other").write_text("")
            train.report({}, checkpoint=path)
        load_state(Model())

    with pytest.raises(TrainingFailedError, match=r"has no file 'model.keras'"):
        run_in_threads(function, num_workers=1, run_config=run_config)
