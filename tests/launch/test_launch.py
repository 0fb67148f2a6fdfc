"""`drawbar launch`, as it is called: what a script finds, and what a shell hears of its end."""

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

from drawbar.train import Result
from tests.launch.conftest import Launch, Pipe


def test_a_script_finds_what_python_and_torchrun_would_give_it(
    launch: Launch, wait_until_gone: Callable[..., None]
) -> None:
    done = launch(
        """
        import atexit, json, os, signal, subprocess, sys, threading

        class Kept:
            number: int = 1

        if os.environ["RANK"] == "1":
            sys.stdout.write("only in its log")
            left = subprocess.Popen(["sleep", "600"], start_new_session=True)
            with open("left", "w") as file:
                file.write(str(left.pid))
            sys.exit()
        names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OWN"]
        names += ["TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"]
        print(json.dumps({
            "argv": sys.argv, "name": __name__, "file": __file__, "path": sys.path[0],
            "folder": os.getcwd(), "drawbar": "drawbar.train" in sys.modules,
            "main thread": threading.current_thread() is threading.main_thread(),
            "main": sys.modules["__main__"].Kept is Kept,
            "annotations": Kept.__annotations__ == {"number": int},
            "variables": [os.environ[name] for name in names],
            "rays": [name for name in os.environ if name.startswith("RAY_")],
            "nice": os.nice(0),
            "told": os.environ["TORCHELASTIC_RUN_ID"] and int(os.environ["MASTER_PORT"]) > 0,
        }))
        signal.signal(signal.SIGUSR2, lambda *_: None)
        sys.stdout.buffer.write(b"\\xff\\x00 as it is\\r\\n")
        print("to standard error", file=sys.stderr)
        atexit.register(print, "at exit", end="")
        """,
        *("--nproc_per_node=2", "--rdzv_backend", "c10d", "--max-restarts", "2"),
        script=("script.py", "--own", "option", "--name=its own"),
        OWN="by the shell",
    )
    assert done.code == 0, done.err
    first, _, rest = done.out.partition(b"\n")
    assert rest == b"\xff\x00 as it is\r\nat exit"
    assert json.loads(first) == {
        "argv": ["script.py", "--own", "option", "--name=its own"],
        "name": "__main__",
        "file": str(launch.script),
        "path": str(launch.folder),
        "folder": str(launch.folder),
        "drawbar": False,
        "main thread": True,
        "main": True,
        "annotations": True,
        "variables": ["0", "0", "2", "2", "0", "by the shell", "0", "2"],
        "rays": [],
        "nice": os.nice(0) + 15 * (not may_raise_priority()),
        "told": True,
    }
    assert "Ignoring --rdzv-backend" in done.err
    assert "to standard error" in done.err
    assert "to standard error" in done.log(0)
    assert done.log(1) == "only in its log"
    wait_until_gone([int((launch.folder / "left").read_text())])


def may_raise_priority() -> bool:
    """Whether processes of this user may take back that Ray has its workers stand back."""
    code = "import os; os.nice(1); os.setpriority(os.PRIO_PROCESS, 0, os.nice(0) - 1)"
    return subprocess.run([sys.executable, "-c", code], stderr=subprocess.DEVNULL).returncode == 0


def test_the_first_failure_of_a_module_is_told_last(launch: Launch) -> None:
    package = launch.folder / "package"
    package.mkdir()
    (package / "module.py").write_text(
        "import os, sys\n"
        "def fail():\n"
        "    raise ValueError(f'what {sys.argv[1:]} does in {__package__}, \\udcff')\n"
        "if os.environ['RANK'] == '1':\n"
        "    fail()\n"
        "import time; time.sleep(600)\n"
    )
    done = launch("", "-m", script=("package.module", "it"))
    assert done.code == 1
    assert done.err.splitlines()[-1].strip() == "ValueError: what ['it'] does in package, ?"
    assert f"{package}/module.py:3 in fail" in done.err
    assert "program_main" not in done.err + done.log(1)
    assert "runpy" not in done.err + done.log(1)


def test_it_starts_anew_in_new_processes_and_its_exit_code_is_that_of_the_first_to_fail(
    launch: Launch,
) -> None:
    done = launch(
        """
        import os, signal, sys, time
        from drawbar import train
        count, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"]
        print("start", count, "is process", os.getpid(), "of", os.getppid(), flush=True)
        if count == 0:
            with train.checkpoint_dir() as path:
                (path / rank).write_text("saved")
                train.report({"count": count}, checkpoint=path)
        saved = sorted(each for each in os.listdir(train.get_checkpoint().path) if each[0] != ".")
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
    told = [line for line in done.out.decode().splitlines() if line.startswith("[")]
    assert told == ["['0', '1'] ['0', '1']"] * 2
    assert Result.from_path(done.run).metrics == {"count": 0}


def test_launch_after_sighup_or_ctrl_c_cleans_up_and_a_second_ctrl_c_kills(
    launch: Launch, pipe: Pipe, wait_until_gone: Callable[..., None]
) -> None:
    source = f"""
        import os, time

        def tell(*words):
            with open({str(launch.folder / "pipe")!r}, "w") as file:
                print(*words, file=file)

        try:
            tell(os.getpid())
            time.sleep(600)
        finally:
            tell("cleans up")
            if {{endless}}:
                time.sleep(600)
        """
    for endless, number, code in ((False, signal.SIGHUP, 129), (True, signal.SIGINT, 130)):
        with launch.start(source.format(endless=endless)) as process:
            pids = [int(pipe.hear(process)[0]) for _ in range(2)]
            os.kill(process.pid, number)
            assert [pipe.hear(process) for _ in range(2)] == [["cleans", "up"]] * 2
            if endless:
                os.kill(process.pid, signal.SIGINT)
            assert launch.ended(process).code == code
        wait_until_gone(pids)


def test_a_script_that_neither_writes_nor_computes_hangs(launch: Launch) -> None:
    done = launch(
        """
        import os, signal, threading, time
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGSTOP)
        began = time.process_time()
        while time.process_time() - began < 2.2:  # longer than it may be silent
            pass
        threading.Event().wait()
        """,
        *("--hang-timeout", "2"),
    )
    assert done.code == 1
    assert "no progress: no rank made progress for 2 s" in done.err
    assert f"{launch.script}:8 in <module>, inside wait" in done.err
    assert re.search(r"rank 1: stopped \(state T\): kill -CONT \d+ on \S+$", done.err, re.M)


def test_a_killed_rank_is_started_anew_as_under_torchrun_then_128_and_the_signal(
    launch: Launch,
) -> None:
    source = """
        import os, signal, sys
        count = os.environ["TORCHELASTIC_RESTART_COUNT"]
        meeting = f"{sys.argv[1]}_{count}"
        if os.environ["RANK"] == "0":
            print("start", count, flush=True)
            open(meeting, "w")
            signal.pause()
        open(meeting)
        os.kill(os.getpid(), signal.SIGKILL if count == "0" else signal.SIGSEGV)
        """
    for name in ("here_0", "here_1", "there_0", "there_1"):
        os.mkfifo(launch.folder / name)
    process = launch.start(
        source, *("--nproc_per_node=2", "--max-restarts", "1"), script=("script.py", "here")
    )
    theirs = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"),
            *("--standalone", "--max-restarts", "1", "script.py", "there"),
        ],
        cwd=launch.folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    done = launch.ended(process)
    assert done.out == b"start 0\nstart 1\n", done.err
    assert theirs.stdout == done.out
    assert (done.code, theirs.returncode) == (128 + signal.SIGSEGV, 1)
    assert "killed by SIGSEGV" in done.err


def test_an_elastic_script_ends_when_nobody_reads_its_output_as_under_torchrun(
    launch: Launch,
) -> None:
    source = """
        import os, signal, time
        while os.environ["RANK"] == "0":
            print(os.environ["WORLD_SIZE"])
            time.sleep(0.01)
        signal.pause()
        """
    with launch.start(source, "--num-workers", "1:3") as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.readline() == b"3\n"
        process.stdout.close()
        told = process.stderr.read()
    assert process.returncode == 1
    assert b"stopped, since nobody reads its standard output any more; --name run goes on" in told


def test_signals_to_the_process_group_end_a_run_on_a_ray_of_its_own_in_order(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import signal\n"
        "try:\n"
        "    print('runs', flush=True)\n"
        "    signal.pause()\n"
        "finally:\n"
        "    print('cleans up')\n"
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
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (143, "cleans up\n"), err
    assert "Stopped by SIGTERM. Use --name run to resume from the latest checkpoint" in err
    assert '"outcome":"stopped"' in (tmp_path / "run/journal.jsonl").read_text().splitlines()[-1]


def test_a_ray_that_is_not_there_or_does_not_start_is_one_line(
    tmp_path: Path, ray_cluster: None
) -> None:
    (tmp_path / "script.py").touch()
    # Without what the tests' own Ray has set, on which it depends what Ray says.
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody listens
        nowhere = f"127.0.0.1:{closed.getsockname()[1]}"
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "drawbar.cli", "launch", *options, "script.py"],
                cwd=tmp_path,
                env={**own, "RAY_TMPDIR": str(tmp_path / ("long" * 30))},
                stderr=subprocess.PIPE,
                text=True,
            )
            # The tests' own Ray is a program's: nobody else joins it unasked.
            for options in (["--address", nowhere], ["--standalone"], ["--detach"])
        ]
        told = [process.communicate(timeout=60)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2, 2]
    assert f"drawbar: error: No Ray cluster at {nowhere}: " in told[0]
    assert "AF_UNIX" in told[1]
    assert "--detach needs a Ray that stays" in told[2]
    assert [each.count("\n") for each in told] == [1, 1, 1], told
