"""Scripts that end by themselves: `drawbar launch` prints what `python` prints."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from drawbar import train
from drawbar.launch import ScriptTrainer
from tests.launch.conftest import Launch

EXIT_WITH_MESSAGE = """
import os, sys
print("hello")
sys.stderr.write("10%\\r20%\\r")
sys.stderr.flush()
os.write(2, b"\\xff no text, and no newline: ")
os.write(1, b"\\xfe no newline")
sys.exit("stopped by the script")
"""

ARGUMENT_ERROR = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int)
parser.parse_args(["--epochs", "many"])
"""

INTERRUPT = """
def train():
    raise KeyboardInterrupt

train()
"""


def run_python(launch: Launch) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, str(launch.script)]
    return subprocess.run(
        command, cwd=launch.directory, stdin=subprocess.DEVNULL, capture_output=True, check=False
    )


def without_start_notices(err: str) -> str:
    """Remove the notices that a start takes long, which appear only on a busy machine."""
    return re.sub(r"(?m)^\[drawbar [\d:]+\] starting \d+ workers?, .*\n", "", err)


@pytest.mark.parametrize(
    "source",
    [
        EXIT_WITH_MESSAGE,
        pytest.param(ARGUMENT_ERROR, marks=pytest.mark.nightly),
        INTERRUPT,
    ],
    ids=["exit", "argparse", "interrupt"],
)
def test_launch_of_script_that_exits_prints_what_python_prints(launch: Launch, source: str) -> None:
    process = launch.start(source)
    python = run_python(launch)
    done = launch.wait_for_end(process)
    code = python.returncode if python.returncode >= 0 else 128 - python.returncode
    err = without_start_notices(done.err).encode(errors="surrogateescape")
    assert (done.out, err, done.code) == (python.stdout, python.stderr, code)


def test_launch_if_only_another_rank_exits_names_its_rank_and_code(launch: Launch) -> None:
    done = launch(
        """
        import os, signal, sys
        if os.environ["RANK"] == "1":
            sys.exit(5)
        print("rank 0 prints", file=sys.stderr, flush=True)
        open("printed", "w")
        signal.pause()
        """
    )
    assert done.code == 5
    lines = without_start_notices(done.err).splitlines()
    log = done.run / "logs" / "rank_1.log"
    assert lines[-1] == f"drawbar: error: Rank 1 exited with code 5. Its output is in {log}."
    assert lines[:-1] in ([], ["rank 0 prints"])


def test_launch_of_script_that_raises_prints_its_traceback_once(launch: Launch) -> None:
    done = launch("raise ValueError('boom')", "--num-workers", "1")
    python = run_python(launch)
    assert done.code == python.returncode == 1
    assert without_start_notices(done.err).startswith(python.stderr.decode())
    assert done.err.count("Traceback") == 1
    assert done.err.count(f"rank 0: ValueError: boom ({launch.script}:1 in <module>)") == 1


def test_launch_names_the_root_cause_before_other_failed_ranks(launch: Launch) -> None:
    done = launch(
        """
        import os, pathlib, time
        rank, has_raised = os.environ["RANK"], pathlib.Path("has_raised")
        if rank == "1":
            try:
                raise KeyError("root cause")
            finally:
                has_raised.touch()
        while not has_raised.exists():
            time.sleep(0.01)
        raise ConnectionError("closed by peer")
        """,
        "--num-workers",
        "2",
    )
    lines = [line for line in done.err.splitlines() if "Error: " in line and "rank " in line]
    assert lines[0].startswith("rank 1: KeyError: 'root cause'")


def test_launch_with_progress_shows_the_state_of_the_run(launch: Launch) -> None:
    done = launch("", "--progress")
    assert done.code == 0
    assert f"run directory {done.run}" in done.err
    assert "finished" in done.err


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("-", "- is not a script that every rank can read"),
        ("/dev/stdin", "/dev/stdin is not a script that every rank can read"),
        ("/dev/fd/0", "/dev/fd/0 is not a script that every rank can read"),
        ("link", "link is not a script that every rank can read"),
        ("fifo", "fifo is a FIFO, but every rank reads the script"),
        ("/dev/null", "/dev/null is a character device, but every rank reads the script"),
        (".", r"\. is a directory. Pass a script in it, or -m and a module"),
    ],
)
def test_script_trainer_rejects_a_script_that_is_not_a_regular_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str, reason: str
) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("fifo")
    os.symlink("/dev/stdin", "link")
    with pytest.raises(ValueError, match=reason):
        ScriptTrainer(path)


def test_launch_of_standard_input_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("print('hello')")
    with open(script, "rb") as file:  # a regular file: /dev/stdin leads to it
        done = subprocess.run(
            [sys.executable, "-m", "drawbar.cli", "launch", "/dev/stdin"],
            stdin=file,
            capture_output=True,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.endswith("Save the script to a file and pass its path.\n")
    assert done.stderr.count("\n") == 1


def test_exit_of_a_script_is_a_failure_of_kind_exit(launch: Launch) -> None:
    (launch.directory / "script.py").write_text("import sys; sys.exit(200)")
    trainer = ScriptTrainer(
        launch.script,
        use_ray=False,
        run_config=train.RunConfig(name="run", storage_path=launch.directory),
    )
    with pytest.raises(train.WorkerGroupError) as failed:
        trainer.fit()
    assert failed.value.failures[0].kind == "exit"
    (error,) = failed.value.worker_failures.values()
    assert isinstance(error, train.ProgramFailedError)
    assert (error.is_exit, error.exit_code) == (True, 200)


@pytest.mark.parametrize(
    "variables",
    [{}, pytest.param({"PYTHONUNBUFFERED": "1"}, marks=pytest.mark.nightly)],
    ids=["", "unbuffered"],
)
@pytest.mark.parametrize(("source", "code"), [("print(1)", 120), ("print(1); exit(3)", 3)])
def test_launch_with_full_stdout_exits_as_python_does(
    launch: Launch, variables: dict[str, str], source: str, code: int
) -> None:
    launch.script.write_text(source)
    run = launch.directory / "run"
    command = [
        sys.executable,
        "-m",
        "drawbar.cli",
        "launch",
        "--name=run",
        f"--storage-path={run.parent}",
    ]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    env["RAY_TMPDIR"] = str(launch.directory)  # without a Ray that happens to run here
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [*command, str(launch.script)],
            env={**env, **variables},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert done.returncode == code
    assert without_start_notices(done.stderr) == (
        "drawbar: error: Standard output is incomplete: No space left on device. "
        f"'drawbar logs {run}' prints all of it.\n"
    )
    assert (run / "logs" / "rank_0.log").read_text() == "1\n"


def test_launch_with_deterministic_failure_exits_with_70_after_one_restart(launch: Launch) -> None:
    source = "print('attempt', flush=True)\nraise ValueError(f'bad row {id(object())}')"
    done = launch(source, "--num-workers=1", "--max-failures=5")
    assert (done.code, done.out.count(b"attempt")) == (70, 2)
    assert "twice at the same place, in two processes" in done.err
    assert "--no-stop-when-deterministic restarts the run anyway" in done.err
    always = launch(source, "--num-workers=1", "--max-failures=2", "--no-stop-when-deterministic")
    assert (always.code, always.out.count(b"attempt")) == (1, 3)


def test_launch_of_script_that_exits_twice_keeps_its_code_and_explains_the_end(
    launch: Launch,
) -> None:
    done = launch(
        "import sys; print('attempt'); sys.exit(3)", "--num-workers=1", "--max-failures=5"
    )
    assert (done.code, done.out.count(b"attempt")) == (3, 2)
    assert "The run ends: the same failure has happened twice at the same place" in done.err
    assert "--no-stop-when-deterministic" in done.err


def test_launch_of_script_killed_by_signal_exits_with_its_code(launch: Launch) -> None:
    source = "import os; print('attempt', flush=True); os.kill(os.getpid(), 15)"
    done = launch(source, "--num-workers=1", "--max-failures=2")
    assert (done.code, done.out.count(b"attempt")) == (143, 3)
