"""Private APIs and files of Ray Tune: each test fails when Tune changes what Drawbar uses."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ray import tune
from ray.tune.experiment import Trial
from ray.tune.logger import JsonLoggerCallback, LoggerCallback
from ray.tune.trainable import FunctionTrainable

from drawbar.tune import _compat
from drawbar.tune._result_files import truncate_after
from drawbar.tune._trainable import TuneCheckpoint
from tests._ray_compat import make_tune_checkpoint_manager


class PlainTrial:
    """Trial with a class as its trainable."""

    def __init__(self, trainable: type[tune.Trainable]) -> None:
        self.trainable = trainable

    def get_trainable_cls(self) -> type[tune.Trainable]:
        return self.trainable


@pytest.fixture
def calls() -> Iterator[list[object]]:
    """Calls of Tune's own method, and of the replacement, which is removed afterwards."""
    calls: list[object] = []
    kind: Any = LoggerCallback
    method = kind._restore_from_remote
    yield calls
    kind._restore_from_remote = method


def test_logger_has_method_that_restores_result_files() -> None:
    assert list(inspect.signature(_compat._original_restore).parameters) == [
        "self",
        "file_name",
        "trial",
    ]
    assert "_restore_from_remote" in inspect.getsource(JsonLoggerCallback)
    assert callable(Trial.get_trainable_cls)


def test_replaced_restore_applies_to_trials_of_one_type(
    calls: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Mine(FunctionTrainable): ...

    def restore(file_name: str, trial: object, restore_by_tune: _compat.Restore) -> None:
        calls.append(file_name)

    monkeypatch.setattr(_compat, "_original_restore", lambda *_: calls.append("by Tune"))
    _compat.replace_result_restore(restore, Mine)
    kind: Any = JsonLoggerCallback
    logger = kind()
    logger._restore_from_remote("result.json", PlainTrial(type("Given", (Mine,), {})))
    logger._restore_from_remote("result.json", PlainTrial(FunctionTrainable))
    assert calls == ["result.json", "by Tune"]


def test_result_files_have_their_names() -> None:
    assert (_compat.RESULT_FILE, _compat.PROGRESS_FILE) == ("result.json", "progress.csv")


def test_training_result_has_checkpoint_and_metrics() -> None:
    result: Any = _compat.TrainingResult(None, {"loss": 1})
    assert (result.checkpoint, result.metrics) == (None, {"loss": 1})


def test_trainable_has_last_result_and_storage(tmp_path: Path) -> None:
    source = inspect.getsource(tune.Trainable)
    assert "self._last_result = result" in source
    assert "self._storage = storage" in source


@pytest.mark.parametrize(("after", "left"), [(0, 0), (1, 1), (2, 2), (9, 2)])
def test_truncate_after_removes_later_results(tmp_path: Path, after: int, left: int) -> None:
    """Written as Tune's loggers write; the last line as a killed driver leaves it."""
    lines = [f'{{"loss": NaN, "training_iteration": {number}}}\n' for number in (1, 2, 3)]
    (tmp_path / "result.json").write_text("".join(lines)[:-3])
    rows = ["training_iteration,text\r\n", '1,"two\nlines"\r\n', "2,\r\n", ""]
    (tmp_path / "progress.csv").write_bytes("".join(rows).encode())
    for name in ("result.json", "progress.csv"):
        truncate_after(tmp_path / name, after)
    assert (tmp_path / "result.json").read_text() == "".join(lines[:left])
    expected = "".join(rows[: left + 1]) if left else ""  # the logger writes the header again
    assert (tmp_path / "progress.csv").read_bytes() == expected.encode()


def test_tune_checkpoint_registered_twice_is_not_deleted(tmp_path: Path) -> None:
    """As when a trial is paused: Tune's own results would have `num_to_keep=1` delete it."""
    manager = make_tune_checkpoint_manager(tune.CheckpointConfig(num_to_keep=1))
    newest = tmp_path / "checkpoint_1"
    for name in ("checkpoint_0", "checkpoint_1", "checkpoint_1"):
        (tmp_path / name).mkdir(exist_ok=True)
        manager.register_checkpoint(TuneCheckpoint(tune.Checkpoint(str(tmp_path / name)), {}))
    assert list(tmp_path.iterdir()) == [newest]
