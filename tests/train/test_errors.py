"""Every error crosses a process border unchanged, and says the root cause first."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

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
    _errors,
)
from drawbar.train._errors import FailureKind, sort_root_cause_first
from tests.train.local_runs import fit

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
def test_every_error_pickles(error: BaseException, module: Any) -> None:
    assert content(module.loads(module.dumps(error))) == content(error)
    assert content(copy.copy(error)) == content(error)


def test_every_error_is_in_the_list_above() -> None:
    classes = {kind for kind in vars(_errors).values() if isinstance(kind, type)}
    raised = {kind for kind in classes if issubclass(kind, BaseException)}
    assert raised == {type(error) for error in ERRORS}


class TuningFailed(WorkerGroupError):
    """A user's subclass with an `__init__` of its own."""

    def __init__(self, trial: int) -> None:
        super().__init__(f"trial {trial} failed", failures=[FAILURE])
        self.trial = trial


def test_a_subclass_with_its_own_init_pickles() -> None:
    error = pickle.loads(pickle.dumps(TuningFailed(3)))
    assert (str(error), error.trial, error.failures) == ("trial 3 failed", 3, [FAILURE])


def test_notes_survive_pickling() -> None:
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
def test_the_tree_is_the_one_drawn(error: type, base: type) -> None:
    assert error.__base__ is base


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "rank 1: ValueError: boom (train.py:12 in step)"),
        ({"where": ""}, "rank 1: ValueError: boom"),
        ({"message": ""}, "rank 1: ValueError (train.py:12 in step)"),
        ({"message": "\n\nfar below"}, "rank 1: ValueError: far below (train.py:12 in step)"),
        ({"rank": -1, "where": ""}, "ValueError: boom"),
    ],
)
def test_a_headline_is_one_line(changes: dict[str, Any], line: str) -> None:
    fields = {name: getattr(FAILURE, name) for name in FAILURE.__struct_fields__}
    assert WorkerFailure(**fields | changes).headline() == line


def test_a_description_has_process_log_file_and_traceback() -> None:
    lines = FAILURE.describe().splitlines()
    assert lines[:3] == [
        "rank 1: ValueError: boom (train.py:12 in step)",
        "  pid 321 on node-7, after 4 reports",
        "  full output: /runs/a/logs/rank_1.log",
    ]
    assert lines[-1] == "  ValueError: boom"


def test_a_description_without_traceback_has_the_whole_message() -> None:
    failure = WorkerFailure(rank=0, kind="died", type_name="died", message="SIGSEGV\nstack a\nb")
    assert failure.describe() == "rank 0: died: SIGSEGV\n  stack a\n  b"


def test_a_worker_error_shows_its_failure() -> None:
    error = WorkerError(FAILURE)
    assert str(error) == FAILURE.describe()
    assert error.failure is FAILURE


def at(time: float, rank: int, kind: FailureKind = "exception") -> WorkerFailure:
    return WorkerFailure(rank=rank, kind=kind, type_name="E", message="", time=time)


@pytest.mark.parametrize(
    ("failures", "ranks"),
    [
        ([at(2, 0), at(1, 1)], [1, 0]),
        ([at(1, 3), at(1, 2)], [2, 3]),
        ([at(1.0, 0), at(1.05, 1, "died")], [1, 0]),  # the broken connection was seen first
        ([at(1.0, 0), at(1.2, 1, "died")], [0, 1]),
        ([], []),
    ],
)
def test_the_root_cause_comes_first(failures: list[WorkerFailure], ranks: list[int]) -> None:
    assert [failure.rank for failure in sort_root_cause_first(failures)] == ranks


def test_of_a_very_long_message_the_middle_is_in_the_log(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    message = f"{'a' * 60_000}{'b' * 60_000}"

    def function() -> None:
        raise ValueError(message)

    with pytest.raises(WorkerGroupError) as caught:
        fit(function, tmp_path)
    told = str(caught.value)
    assert len(told) + len("".join(capfd.readouterr())) < 60_000
    assert f"rank 0: ValueError: {'a' * 148} ..." in str(caught.value)
    assert message not in told
    (failure,) = caught.value.failures
    assert failure.message == message
    assert message in Path(failure.log_path).read_text()
