"""Tests of errors: pickling, class hierarchy, and descriptions of worker failures."""

from __future__ import annotations

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from drawbar import train
from drawbar.train import (
    CheckpointError,
    ControllerError,
    DamagedRunError,
    DivergenceError,
    HangError,
    InsufficientResourcesError,
    PreemptionError,
    ProgramFailedError,
    ResumeError,
    RunInProgressError,
    StorageError,
    TrainingFailedError,
    UnsupportedFormatError,
    UserAbort,
    WorkerError,
    WorkerFailure,
    WorkerGroupError,
)
from tests.train.runs import fit

FAILURE = WorkerFailure(
    rank=1,
    kind="exception",
    type_name="ValueError",
    message="boom\nand more",
    traceback='Traceback (most recent call last):\n  File "train.py", line 12\nValueError: boom',
    location="train.py:12 in step",
    hostname="node-7",
    pid=321,
    num_reports=4,
    log_path="/runs/a/logs/rank_1.log",
)

ERRORS: list[BaseException] = [
    TrainingFailedError("no", path="/runs/a"),
    WorkerGroupError("no", {1: ValueError("boom")}, failures=[FAILURE], path="/runs/a"),
    DivergenceError("no", failures=[FAILURE]),
    HangError("no", failures=[FAILURE], path="/runs/a"),
    ControllerError("no", OSError(28, "No space left on device"), path="/runs/a"),
    PreemptionError("no", {"deadline": 3}, path="/runs/a"),
    InsufficientResourcesError("no"),
    ResumeError("no"),
    DamagedRunError("no"),
    UnsupportedFormatError("no"),
    RunInProgressError("no"),
    CheckpointError("no"),
    StorageError(28, "No space left on device"),
    ProgramFailedError("killed by SIGKILL", "program died", 137, 1.5),
    WorkerError(FAILURE),
    UserAbort("stopped"),
]


def content(error: BaseException) -> tuple[Any, ...]:
    return type(error), str(error), {name: repr(value) for name, value in vars(error).items()}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("module", [pickle, cloudpickle])
def test_errors_survive_pickling_and_copying(error: BaseException, module: Any) -> None:
    assert content(module.loads(module.dumps(error))) == content(error)
    assert content(copy.copy(error)) == content(error)


def test_errors_are_all_covered_by_these_tests() -> None:
    classes = {kind for kind in vars(train).values() if isinstance(kind, type)}
    raised = {kind for kind in classes if issubclass(kind, BaseException)}
    assert raised == {type(error) for error in ERRORS}


class TuningFailed(WorkerGroupError):
    """A user's subclass with a custom `__init__`."""

    def __init__(self, trial: int) -> None:
        super().__init__(f"trial {trial} failed", failures=[FAILURE])
        self.trial = trial


def test_error_subclass_with_custom_init_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(TuningFailed(3)))
    assert (str(error), error.trial, error.failures) == ("trial 3 failed", 3, [FAILURE])


def test_error_notes_survive_pickling() -> None:
    error = ControllerError("no")
    error.add_note("seen by the callback")
    assert pickle.loads(pickle.dumps(error)).__notes__ == ["seen by the callback"]


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (WorkerGroupError, TrainingFailedError),
        (DivergenceError, WorkerGroupError),
        (HangError, WorkerGroupError),
        (ControllerError, TrainingFailedError),
        (PreemptionError, TrainingFailedError),
        (InsufficientResourcesError, TrainingFailedError),
        (TrainingFailedError, RuntimeError),
        (ResumeError, ValueError),
        (CheckpointError, RuntimeError),
        (WorkerError, RuntimeError),
        (UserAbort, KeyboardInterrupt),
    ],
)
def test_errors_have_documented_base_classes(error: type, base: type) -> None:
    assert error.__base__ is base


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "rank 1: ValueError: boom (train.py:12 in step)"),
        ({"location": ""}, "rank 1: ValueError: boom"),
        ({"message": ""}, "rank 1: ValueError (train.py:12 in step)"),
        ({"message": "\n\nfar below"}, "rank 1: ValueError: far below (train.py:12 in step)"),
        ({"rank": -1, "location": ""}, "ValueError: boom"),
    ],
)
def test_worker_failure_headline_is_one_line(changes: dict[str, Any], line: str) -> None:
    fields = {name: getattr(FAILURE, name) for name in FAILURE.__struct_fields__}
    assert WorkerFailure(**fields | changes).headline() == line


def test_worker_failure_description_has_process_log_and_traceback() -> None:
    lines = FAILURE.describe().splitlines()
    assert lines[:3] == [
        "rank 1: ValueError: boom (train.py:12 in step)",
        "  pid 321 on node-7, after 4 reports",
        "  full output: /runs/a/logs/rank_1.log",
    ]
    assert lines[-1] == "  ValueError: boom"


def test_worker_failure_description_without_traceback_has_full_message() -> None:
    failure = WorkerFailure(rank=0, kind="died", type_name="died", message="SIGSEGV\nstack a\nb")
    assert failure.describe() == "rank 0: died: SIGSEGV\n  stack a\n  b"


def test_worker_error_message_is_the_failure_description() -> None:
    error = WorkerError(FAILURE)
    assert str(error) == FAILURE.describe()
    assert error.failure is FAILURE


def test_worker_failure_with_very_long_message_omits_its_middle(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = f"{'a' * 60_000}{'b' * 60_000}"

    def function() -> None:
        raise ValueError(message)

    with pytest.raises(WorkerGroupError) as caught:
        fit(function, tmp_path)
    text = str(caught.value)
    assert len(text) + len("".join(capfd.readouterr())) < 60_000
    assert f"rank 0: ValueError: {'a' * 148} ... (" in text
    # The message is omitted from the headline, and the traceback ends with it.
    (omitted,) = re.findall(r"a \[\.\.\. (\d+) characters omitted \.\.\.\] b", text)
    assert int(omitted) > 100_000
    assert message not in text
    (failure,) = caught.value.failures
    assert failure.message == message
    assert message in Path(failure.log_path).read_text()
