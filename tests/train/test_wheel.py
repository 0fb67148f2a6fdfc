"""Tests of the built wheel, installed where the checkout cannot be imported."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

SCRIPT = """
import drawbar.train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig

def train_func():
    return drawbar.train.__file__

if __name__ == "__main__":
    for num_workers in (0, 1):
        result = DataParallelTrainer(
            train_func,
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(name=f"run{num_workers}", storage_path="runs"),
        ).fit()
        print(result.return_value)
"""


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command to its end, which must be a good one; give its stdout."""
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    options = ["--no-deps", "--no-build-isolation", "--no-index", f"--wheel-dir={folder}"]
    run(sys.executable, "-m", "pip", "wheel", ROOT, *options, cwd=folder)
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel; the dependencies are found where they are here.

    A line in a .pth file adds that folder to the path without reading the .pth files in it, so that
    an editable install of the checkout there is not seen.
    """
    venv = tmp_path_factory.mktemp("venv")
    run(sys.executable, "-m", "venv", "--without-pip", venv, cwd=venv)
    python = venv / "bin" / "python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", wheel, cwd=venv)
    here = sysconfig.get_path("purelib")
    purelib = run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=venv)
    Path(purelib.strip(), "dependencies.pth").write_text(here)
    return python


def test_wheel_contains_all_packages_with_types_and_no_tests(wheel: Path) -> None:
    files = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    names = [name for name in files if name != "drawbar_fork_server.pth"]
    packages = {"/".join(name.split("/")[:2]) for name in names}  # py.typed covers subpackages
    assert "drawbar/train" in packages
    assert {name for name in names if name.endswith("py.typed")} == {
        f"{package}/py.typed" for package in packages
    }
    assert all(name.startswith("drawbar/") for name in names)
    assert len(files) == len(names) + 1
    assert not [name for name in names if "test_" in name or "conftest" in name]
    sources = {*(ROOT / "core").rglob("*.py"), *(ROOT / "integrations").rglob("*.py")}
    assert sum(name.endswith(".py") for name in names) == len(sources)


def test_python_with_the_wheel_replaces_only_the_setup_of_forked_workers(
    python: Path, tmp_path: Path
) -> None:
    site = python.parents[1] / "lib" / f"python3.{sys.version_info.minor}" / "site-packages"
    client = site / "drawbar" / "_fork_server" / "client.py"
    script = tmp_path / "ray" / "_private" / "workers" / "setup_worker.py"
    script.parent.mkdir(parents=True)
    script.write_text("print('setup of Ray')")

    def start_worker(py_executable: str) -> str:
        context: dict[str, object] = {
            "command_prefix": [],
            "env_vars": {},
            "py_executable": py_executable,
            "override_worker_entrypoint": None,
            "java_jars": [],
        }
        options = ["--language=PYTHON", f"--serialized-runtime-env-context={json.dumps(context)}"]
        return run(python, script, "default_worker.py", *options, cwd=tmp_path).strip()

    assert start_worker(f"echo forked by {client}") == f"forked by {client} default_worker.py"
    assert start_worker("echo of the user") == "setup of Ray"
    assert run(python, "-c", "print('another script')", cwd=tmp_path) == "another script\n"


def test_wheel_runs_training_from_another_directory(
    python: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "train.py").write_text(SCRIPT)
    lines = run(python, "train.py", cwd=tmp_path).splitlines()
    assert len(lines) == 2  # of a run in this process, and of one on a worker
    assert all(line.startswith(str(python.parents[1])) for line in lines)
