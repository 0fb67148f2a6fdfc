"""Tracebacks of errors: frames of users, without frames of Drawbar."""

from __future__ import annotations

import signal
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import drawbar
from drawbar import train
from drawbar.train import testing
from tests.train.runs import fit

MAKE_CONFIG: Any = train.RunConfig
MAKE_TRAINER: Any = train.DataParallelTrainer


def succeed() -> None:
    pass


def fail() -> None:
    raise ValueError("broken")


def count_internal_frames(function: Callable[[], object]) -> int:
    """Return how many of the frames of the error belong to Drawbar; the first one must not."""
    try:
        function()
    except Exception as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    assert files[0] == __file__
    return sum(file.startswith(tuple(drawbar.__path__)) for file in files)


@pytest.mark.parametrize(
    "call",
    [
        lambda path: fit(fail, path),
        lambda path: MAKE_CONFIG(name=3),
        lambda path: MAKE_CONFIG(nam="x"),
        lambda path: MAKE_TRAINER(fail, scaling_config=3),
        lambda path: train.attach(fit(succeed, path).path).wait(timeout=-1),
    ],
)
def test_traceback_has_only_called_function_of_drawbar(
    call: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert count_internal_frames(lambda: call(tmp_path)) == 1
    monkeypatch.setenv("DRAWBAR_FULL_TRACEBACK", "1")
    assert count_internal_frames(lambda: call(tmp_path)) > 1


def test_traceback_of_run_in_threads_omits_internal_frames(tmp_path: Path) -> None:
    config = train.RunConfig(name="run", storage_path=tmp_path)
    assert count_internal_frames(lambda: testing.run_in_threads(fail, run_config=config)) == 1


def set_signal_handler() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_signal_handler_in_training_thread_explains_alternatives(tmp_path: Path) -> None:
    with pytest.raises(train.WorkerGroupError, match=r"call train\.should_checkpoint") as caught:
        fit(set_signal_handler, tmp_path, num_workers=1, in_threads=True)
    assert "signal only works in main thread" in str(caught.value)
