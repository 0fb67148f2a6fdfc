"""Tests of ScriptTrainer and exit_code_of()."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from drawbar import train
from drawbar.launch import ScriptTrainer, exit_code_for
from drawbar.train import ProgramFailedError, WorkerFailure, WorkerGroupError
from tests.launch.conftest import Launch


def test_script_trainer_rejects_missing_script_and_zero_workers(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"No script nowhere\.py"):
        ScriptTrainer("nowhere.py")
    with pytest.raises(ValueError, match=f"{tmp_path} is a directory"):
        ScriptTrainer(tmp_path)
    with pytest.raises(ValueError, match="num_workers=0"):
        ScriptTrainer(__file__, scaling_config=train.ScalingConfig(num_workers=0))


def test_script_trainer_finds_the_modules_that_python_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "regular/__init__.py": "raise ImportError('only a script may')",
        "regular/module.py": "",
        "regular/__main__.py": "",
        "namespace/module.py": "",
        "elsewhere/__init__.py": "__path__.append(__path__[0] + '/../far')",
        "far/module.py": "",
    }.items():
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    with zipfile.ZipFile(tmp_path / "zipped.zip", "w") as archive:
        archive.writestr("packed/__init__.py", "")
        archive.writestr("packed/__main__.py", "")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "zipped.zip"))
    monkeypatch.syspath_prepend(tmp_path / "zipped.zip")
    # Importing `regular`, which only the script may do, could create `regular.other`.
    importable = (
        "regular",
        "regular.module",
        "regular.other",
        "namespace.module",
        "elsewhere.module",
    )
    for name in (*importable, "packed", "json.tool"):
        ScriptTrainer(name, is_module=True)
    missing = ("namespace", "elsewhere", "elsewhere.other", "email", "nowhere.at.all", "", "a..b")
    for name in missing:
        with pytest.raises(ModuleNotFoundError, match=f"No module {name} in"):
            ScriptTrainer(name, is_module=True)


@pytest.mark.parametrize(
    ("kind", "message", "code"),
    [
        ("died", "killed by SIGKILL, from outside", 137),
        ("died", "killed by SIGSEGV: Fatal Python error", 139),
        ("died", "for an unknown reason", 1),
        ("hang", "no rank made progress", 1),
    ],
)
def test_exit_code_of_worker_failure_follows_the_signal(kind: str, message: str, code: int) -> None:
    failure = WorkerFailure(rank=1, kind=kind, type_name="worker process died", message=message)  # type: ignore[arg-type]
    assert exit_code_for(WorkerGroupError("failed", failures=[failure])) == code


def test_exit_code_of_several_failures_uses_the_first() -> None:
    first, later = (ProgramFailedError("", "SystemExit", code, 0.0) for code in (3, 4))
    failures = [
        WorkerFailure(rank=rank, kind="exception", type_name="", message="") for rank in (1, 0)
    ]
    error = WorkerGroupError("failed", {0: later, 1: first}, failures=failures)
    assert exit_code_for(error) == 3
    assert exit_code_for(train.ControllerError("the disk is full")) == 1


def test_launch_detached_prints_name_for_attach(ray_launch: Launch) -> None:
    done = ray_launch("from drawbar import train; train.report({'loss': 0.5})", "--detach")
    assert (done.code, done.out) == (0, b"run\n"), done.err
    assert train.attach(done.run).wait().metrics == {"loss": 0.5}
