"""`drawbar launch` on the command line: environment of scripts, restarts, signals, exit codes."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from drawbar.train import Result, runs
from tests.launch.conftest import CORES, Launch, Pipe

ENVIRONMENT_SCRIPT = """
import atexit, json, os, signal, subprocess, sys, threading

class Record:
    number: int = 1

if os.environ["RANK"] == "1":
    sys.stdout.write("only in its log")
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    with open("child", "w") as file:
        file.write(str(child.pid))
    sys.exit()
names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OWN"]
names += ["TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"]
print(json.dumps({
    "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0],
    "directory": os.getcwd(), "drawbar": "drawbar.train" in sys.modules,
    "main thread": threading.current_thread() is threading.main_thread(),
    "main": sys.modules["__main__"].Record is Record,
    "annotations": Record.__annotations__ == {"number": int},
    "variables": [os.environ[name] for name in names],
    "shell": os.environ.get("RAY_OF_SHELL"),
    "raylet": "RAY_RAYLET_PID" in os.environ,
    "nice": os.nice(0),
    "rendezvous": os.environ["TORCHELASTIC_RUN_ID"] and int(os.environ["MASTER_PORT"]) > 0,
}))
signal.signal(signal.SIGUSR2, lambda *_: None)
sys.stdout.buffer.write(b"\\xff\\x00 as it is\\r\\n")
print("to standard error", file=sys.stderr)
atexit.register(print, "at exit", end="")
"""


def test_launch_gives_scripts_the_environment_of_torchrun(
    any_launch: Launch, wait_until_gone: Callable[..., None]
) -> None:
    done = any_launch(
        ENVIRONMENT_SCRIPT,
        *("--nproc_per_node=2", "--rdzv_backend", "c10d", "--max-restarts", "2"),
        script=("script.py", "--own", "option", "--name=its own"),
        OWN="by the shell",
        RAY_OF_SHELL="set",
    )
    assert done.code == 0, done.err
    first, _, rest = done.out.partition(b"\n")
    assert rest == b"\xff\x00 as it is\r\nat exit"
    assert json.loads(first) == {
        "argv": ["script.py", "--own", "option", "--name=its own"],
        "name": "__main__",
        "file": str(any_launch.script),
        "path": str(any_launch.directory),
        "directory": str(any_launch.directory),
        "drawbar": False,
        "main thread": True,
        "main": True,
        "annotations": True,
        "variables": ["0", "0", "2", "2", "0", "by the shell", "0", "2"],
        "shell": None if any_launch.uses_ray else "set",
        "raylet": False,
        "nice": os.nice(0) + 15 * (any_launch.uses_ray and not can_raise_priority()),
        "rendezvous": True,
    }
    assert "Ignoring --rdzv-backend" in done.err
    assert "to standard error" in done.err
    assert "to standard error" in done.log(0)
    assert done.log(1) == "only in its log"
    wait_until_gone([int((any_launch.directory / "child").read_text())])


def can_raise_priority() -> bool:
    """Return whether processes of this user can undo the lower priority of Ray workers."""
    code = "import os; os.nice(1); os.setpriority(os.PRIO_PROCESS, 0, os.nice(0) - 1)"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


def test_launch_of_failing_module_ends_with_its_failure_and_run_directory(launch: Launch) -> None:
    package = launch.directory / "package"
    package.mkdir()
    (package / "module.py").write_text(
        "import os, sys\n"
        "def fail():\n"
        "    raise ValueError(f'{sys.argv[1:]} failed in {__package__}, \\udcff')\n"
        "if os.environ['RANK'] == '1':\n"
        "    fail()\n"
        "import time; time.sleep(600)\n"
    )
    done = launch("", "-m", script=("package.module", "it"))
    assert done.code == 1
    end = ["  ValueError: ['it'] failed in package, ?", "", f"Run directory: {done.run}"]
    assert done.err.splitlines()[-3:] == end
    assert f"{package}/module.py:3 in fail" in done.err
    assert "program_main" not in done.err + done.log(1)
    assert "runpy" not in done.err + done.log(1)


def test_launch_restart_uses_new_processes_and_returns_exit_code(
    any_launch: Launch,
) -> None:
    done = any_launch(
        """
        import os, signal, sys, time
        from drawbar import train
        count, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
        print("start", count, "is process", os.getpid(), "of", os.getppid(), flush=True)
        if count == 0:
            with train.checkpoint_dir() as path:
                (path / rank).write_text("saved")
                train.report({"count": count}, checkpoint=path)
        saved = sorted(name for name in os.listdir(train.get_checkpoint().path) if name[0] != ".")
        print(saved, train.collective.all_gather(rank), flush=True)
        train.collective.barrier()
        if rank == "1" and count == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == "1" and count == 1:
            sys.exit(3)
        time.sleep(600)
        """,
        *("--max-failures", "1"),
    )
    assert done.code == 3, done.err
    last_line = done.err.splitlines()[-1]
    assert "drawbar: error: Rank 1 exited with code 3. Its output is in" in last_line
    assert "rank 1: program died: killed by SIGKILL" in done.err
    starts = [line.split() for line in done.log(0).splitlines() if line.startswith("start")]
    assert [start[1] for start in starts] == ["0", "1"]
    assert starts[0][4] != starts[1][4]  # another process
    assert starts[0][6] == starts[1][6]  # of the same worker
    lines = [line for line in done.out.decode().splitlines() if line.startswith("[")]
    assert lines == ["['0', '1'] ['0', '1']"] * 2
    assert Result.from_path(done.run).metrics == {"count": 0}


def test_launch_after_sighup_or_ctrl_c_cleans_up_and_a_second_ctrl_c_kills(
    launch: Launch, pipe: Pipe, wait_until_gone: Callable[..., None]
) -> None:
    source = f"""
        import os, time

        def send(*words):
            with open({str(launch.directory / "pipe")!r}, "w") as file:
                print(*words, file=file)

        try:
            send(os.getpid())
            time.sleep(600)
        finally:
            send("cleanup")
            if {{endless}}:
                time.sleep(600)
        """
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    for endless, number, code in ((False, signal.SIGHUP, 129), (True, signal.SIGINT, 130)):
        with launch.start(source.format(endless=endless)) as process:
            pids = [int(pipe.receive(process)[0]) for _ in range(2)]
            os.kill(process.pid, number)
            assert [pipe.receive(process) for _ in range(2)] == [["cleanup"]] * 2
            if endless:
                os.kill(process.pid, signal.SIGINT)
            assert launch.wait_for_end(process).code == code
        wait_until_gone(pids)


@pytest.mark.nightly
def test_launch_of_inactive_script_reports_a_hang(any_launch: Launch) -> None:
    done = any_launch(
        """
        import os, signal, threading, time
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        start = time.process_time()
        while time.process_time() - start < 2.2:  # longer than the hang timeout
            pass
        threading.Event().wait()
        """,
        *("--hang-timeout", "2"),
    )
    assert done.code == 1
    assert "no progress: no rank made progress for 2 s" in done.err
    assert f"{any_launch.script}:8 in <module>, inside wait" in done.err
    assert re.search(r"rank 1: stopped \(state T\): kill -CONT \d+ on \S+$", done.err, re.M)


def test_launch_after_sigkill_restarts_and_exits_with_128_plus_signal(
    launch: Launch,
) -> None:
    source = """
        import os, signal, sys
        count = os.environ["TORCHELASTIC_RESTART_COUNT"]
        fifo = f"{sys.argv[1]}_{count}"
        if os.environ["RANK"] == "0":
            print("start", count, flush=True)
            open(fifo, "w")
            signal.pause()
        open(fifo)
        os.kill(os.getpid(), signal.SIGKILL if count == "0" else signal.SIGSEGV)
        """
    for name in ("drawbar_0", "drawbar_1", "torchrun_0", "torchrun_1"):
        os.mkfifo(launch.directory / name)
    process = launch.start(
        source, *("--nproc_per_node=2", "--max-restarts", "1"), script=("script.py", "drawbar")
    )
    torchrun = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"),
            *("--standalone", "--max-restarts", "1", "script.py", "torchrun"),
        ],
        cwd=launch.directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    done = launch.wait_for_end(process)
    assert done.out == b"start 0\nstart 1\n", done.err
    assert torchrun.stdout == done.out
    assert (done.code, torchrun.returncode) == (128 + signal.SIGSEGV, 1)
    assert "killed by SIGSEGV" in done.err


def test_launch_with_closed_stdout_stops_the_run(
    any_launch: Launch,
) -> None:
    source = """
        import os, signal, time
        while os.environ["RANK"] == "0":
            print(os.environ["WORLD_SIZE"])
            time.sleep(0.01)
        signal.pause()
        """
    with any_launch.start(source, "--num-workers", "1:3") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        num_workers = 3 if any_launch.uses_ray else min(3, CORES)
        assert process.stdout.readline() == f"{num_workers}\n".encode()
        process.stdout.close()
        err = process.stderr.read()
    assert process.returncode == 1
    assert b"Stopped because standard output was closed. Use --name run to resume" in err


def test_standalone_launch_after_sigterm_to_process_group_cleans_up(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal\n"
        "try:\n"
        "    print('runs', flush=True)\n"
        "    signal.pause()\n"
        "finally:\n"
        "    print('cleanup')\n"
    )
    process = subprocess.Popen(
        [
            *(sys.executable, "-m", "drawbar.cli", "launch", "--standalone"),
            *("--storage-path", str(tmp_path), "--name", "run", str(script)),
        ],
        env={name: value for name, value in os.environ.items() if not name.startswith("RAY_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "runs\n"
    os.killpg(process.pid, signal.SIGTERM)
    process.send_signal(signal.SIGTERM)  # as `timeout` does
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (143, "cleanup\n"), err
    assert "Stopped by SIGTERM. Use --name run to resume from the latest checkpoint" in err
    assert runs.find_run(tmp_path / "run").status == "stopped"


def test_launch_without_reachable_ray_prints_one_line_error(
    tmp_path: Path, ray_cluster: None
) -> None:
    (tmp_path / "script.py").touch()
    # Without the variables of the tests' Ray, because Ray's message depends on them.
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # no process listens
        address = f"127.0.0.1:{closed.getsockname()[1]}"
        processes = [
            subprocess.Popen(
                [sys.executable, "-m", "drawbar.cli", "launch", *options, "script.py"],
                cwd=tmp_path,
                env={**env, "RAY_TMPDIR": str(tmp_path / ("long" * 30))},
                stderr=subprocess.PIPE,
                text=True,
            )
            # The tests' Ray was started by a program, so others do not join it automatically.
            for options in (["--address", address], ["--standalone"], ["--detach"])
        ]
        errors = [process.communicate(timeout=300)[1] for process in processes]
    assert [process.returncode for process in processes] == [2, 2, 2]
    assert f"drawbar: error: No Ray cluster at {address}: " in errors[0]
    assert "AF_UNIX" in errors[1]
    assert "--detach needs a running Ray cluster" in errors[2]
    assert [error.count("\n") for error in errors] == [1, 1, 1], errors
