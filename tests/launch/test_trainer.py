"""`ScriptTrainer`: what it refuses, and what a shell is told of how its run has failed."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from drawbar import train
from drawbar.launch import ScriptTrainer, exit_code_for
from drawbar.train import ProgramFailedError, WorkerFailure, WorkerGroupError
from tests.launch.conftest import Launch


def test_what_is_no_script_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No script nowhere\.py"):
        ScriptTrainer("nowhere.py")
    with pytest.raises(ValueError, match="num_workers=0"):
        ScriptTrainer(__file__, scaling_config=train.ScalingConfig(num_workers=0))


def test_modules_are_those_that_python_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for place, text in {
        "regular/__init__.py": "raise ImportError('only a script may')",
        "regular/module.py": "",
        "regular/__main__.py": "",
        "namespace/module.py": "",
        "elsewhere/__init__.py": "__path__.append(__path__[0] + '/../far')",
        "far/module.py": "",
    }.items():
        path = tmp_path / place
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        archive.writestr("packed/__init__.py", "")
        archive.writestr("packed/__main__.py", "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "zipped.zip"))
    monkeypatch.syspath_prepend(tmp_path / "zipped.zip")
    # `regular.other` may be made by what only a script may import.
    there = ("regular", "regular.module", "regular.other", "namespace.module", "elsewhere.module")
    for name in (*there, "packed", "json.tool"):
        ScriptTrainer(name, is_module=True)
    nowhere = ("namespace", "elsewhere", "elsewhere.other", "email", "nowhere.at.all", "", "a..b")
    for name in nowhere:
        with pytest.raises(ModuleNotFoundError, match=f"No module {name} in"):
            ScriptTrainer(name, is_module=True)


@pytest.mark.parametrize(
    ("kind", "message", "code"),
    [
        ("died", "killed by SIGKILL, from outside", 137),
        ("died", "killed by SIGSEGV: Fatal Python error", 139),
        ("died", "vanished without a trace", 1),
        ("hang", "no rank made progress", 1),
    ],
)
def test_a_worker_that_dies_is_told_like_a_script(kind: str, message: str, code: int) -> None:
    failure = WorkerFailure(rank=1, kind=kind, type_name="worker process died", message=message)  # type: ignore[arg-type]
    assert exit_code_for(WorkerGroupError("failed", failures=[failure])) == code


def test_the_first_failure_counts() -> None:
    first, later = (ProgramFailedError("", "SystemExit", code, 0.0) for code in (3, 4))
    failures = [
        WorkerFailure(rank=rank, kind="exception", type_name="", message="") for rank in (1, 0)
    ]
    error = WorkerGroupError("failed", {0: later, 1: first}, failures=failures)
    assert exit_code_for(error) == 3
    assert exit_code_for(train.ControllerError("the disk is full")) == 1


def test_a_detached_run_is_found_again(launch: Launch) -> None:
    done = launch("from drawbar import train; train.report({'loss': 0.5})", "--detach")
    assert (done.code, done.out) == (0, b"run\n"), done.err
    assert train.attach(done.run).wait().metrics == {"loss": 0.5}
