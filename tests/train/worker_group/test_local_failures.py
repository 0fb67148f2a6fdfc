"""Failures in local mode: headlines, tracebacks, and warnings name the line of the user."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from drawbar import train
from drawbar.train import FailureConfig, WorkerError, WorkerGroupError
from tests.train.runs import fit

if TYPE_CHECKING:
    pass


def line_of(function: Any) -> int:
    """Return the number of the first line of a function's body."""
    return int(function.__code__.co_firstlineno) + 1


class Unpicklable(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("not this one")


@pytest.mark.parametrize(
    ("make", "headline", "kept"),
    [
        (lambda: ValueError("boom"), "ValueError: boom", ValueError),
        (lambda: SystemExit(3), "SystemExit: 3", WorkerError),
        (lambda: GeneratorExit(), "GeneratorExit", WorkerError),
        (lambda: Unpicklable("x"), "Unpicklable: x", WorkerError),
        (lambda: OSError(28, "No space left"), "OSError: [Errno 28] No space left", OSError),
        (lambda: ExceptionGroup("two", [ValueError()]), "ExceptionGroup: two (1", ExceptionGroup),
        (lambda: ValueError("first\nsecond"), "ValueError: first (", ValueError),
    ],
)
def test_exception_in_function_reports_user_line(
    tmp_path: Path, make: Callable[[], BaseException], headline: str, kept: type[Exception]
) -> None:
    def function() -> None:
        raise make()

    with pytest.raises(WorkerGroupError) as raised:
        fit(function, tmp_path)
    assert str(raised.value).startswith(f"rank 0: {headline}")
    (failure,) = raised.value.failures
    assert failure.location == f"{__file__}:{line_of(function)} in function"
    assert (failure.rank, failure.pid, failure.kind) == (0, os.getpid(), "exception")
    assert isinstance(raised.value.worker_failures[0], kept)
    assert raised.value.path == str(tmp_path / "run")


def test_traceback_of_chained_exception_has_cause_and_no_drawbar_frames(tmp_path: Path) -> None:
    def function() -> None:
        try:
            os.environ["NOT SET"]
        except KeyError as error:
            raise ValueError("unknown key") from error

    with pytest.raises(WorkerGroupError) as raised:
        fit(function, tmp_path)
    assert "KeyError: 'NOT SET'" in str(raised.value)
    assert "was the direct cause of" in str(raised.value)
    assert str(Path(train.__file__).parent) not in raised.value.failures[0].traceback


@pytest.mark.parametrize("module", ["mine_beside", "drawbar.mine_inside"])
def test_traceback_in_directory_named_drawbar_has_user_frames(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str
) -> None:
    folder = tmp_path / "drawbar"  # becomes a portion of the namespace package
    folder.mkdir()
    file = folder / f"{module.rpartition('.')[2]}.py"
    file.write_text("def function():\n    step()\n\ndef step():\n    raise ValueError('boom')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.syspath_prepend(folder)
    with pytest.raises(WorkerGroupError) as raised:
        fit(importlib.import_module(module).function, tmp_path)
    (failure,) = raised.value.failures
    assert failure.location == f"{file}:5 in step"
    assert failure.traceback.count(f'File "{file}"') == 2


def test_warning_in_directory_named_drawbar_has_user_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "drawbar").mkdir()
    file = tmp_path / "drawbar" / "mine_configured.py"
    file.write_text(
        "from drawbar.train import FailureConfig\n"
        "def configure():\n"
        "    FailureConfig(preemption_grace_s=1)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(UserWarning, match="preemption_grace_s") as caught:
        importlib.import_module("drawbar.mine_configured").configure()
    assert (caught[0].filename, caught[0].lineno) == (str(file), 3)


def test_error_in_report_has_no_drawbar_frames(tmp_path: Path) -> None:
    def function() -> None:
        train.report({"loss": object()}, checkpoint_dir_name="../elsewhere")

    with pytest.raises(WorkerGroupError) as raised:
        fit(function, tmp_path)
    (failure,) = raised.value.failures
    assert failure.traceback.count('File "') == 1
    assert failure.location == f"{__file__}:{line_of(function)} in function"


@pytest.mark.parametrize("max_failures", [0, 1])
def test_traceback_of_failure_is_shown_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], max_failures: int
) -> None:
    def function() -> None:
        raise ValueError("boom")

    with pytest.raises(WorkerGroupError) as raised:
        fit(function, tmp_path, failure_config=FailureConfig(max_failures=max_failures))
    assert str(raised.value).count("Traceback") == 1
    shown = capsys.readouterr().err
    assert shown.count("Traceback") == max_failures
    assert shown.count("rank 0: ValueError: boom") == max_failures


@pytest.mark.parametrize("installed", [False, True])
def test_headline_with_installed_code_has_user_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    libraries = tmp_path / "project" / "venv" / "lib" / "site-packages"
    mine = libraries if installed else tmp_path / "project"
    libraries.mkdir(parents=True)
    name = f"mine_{installed}"
    (libraries / "theirs.py").write_text("def call():\n    raise ValueError('boom')\n")
    (mine / f"{name}.py").write_text("import theirs\n\ndef function():\n    theirs.call()\n")
    monkeypatch.syspath_prepend(libraries)
    monkeypatch.syspath_prepend(mine)
    with pytest.raises(WorkerGroupError) as raised:
        fit(importlib.import_module(name).function, tmp_path)
    assert raised.value.failures[0].location == f"{mine}/{name}.py:4 in function"
