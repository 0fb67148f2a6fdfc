"""`drawbar launch` on one machine without Ray."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import ray

from drawbar import train, ui
from drawbar.launch import ScriptTrainer
from drawbar.train import attach, runs
from tests.launch.conftest import CORES, Launch, Pipe


def test_launch_with_restart_and_checkpoints_does_not_import_ray(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import os
            from drawbar import train

            with train.checkpoint_dir() as path:
                (path / "file").write_text("saved")
                train.report({"step": 1}, checkpoint=path)
            train.collective.barrier()
            assert os.environ["TORCHELASTIC_RESTART_COUNT"] == "1"
            """
        )
    )
    options = ["--nproc-per-node", "2", "--max-restarts", "1", "--storage-path", str(tmp_path)]
    code = f"""
import atexit, sys
from drawbar.cli import main
atexit.register(lambda: print("ray" in sys.modules))
main({["launch", *options, str(script)]!r})
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "RAY_TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "False\n")


def test_launch_after_sigkill_of_launcher_leaves_no_process(
    launch: Launch, pipe: Pipe, wait_until_gone: Callable[..., None]
) -> None:
    source = f"""
        import os, signal, subprocess, sys

        command = [sys.executable, "-c", "import signal; signal.pause()"]
        child = subprocess.Popen(command, start_new_session=True)
        with open({str(launch.directory / "pipe")!r}, "w") as file:
            print(os.getpid(), child.pid, file=file)
        signal.pause()
        """
    with launch.start(source) as process:
        pids = [int(pid) for _ in range(2) for pid in pipe.receive(process)]
        process.kill()
        wait_until_gone(pids)


def test_launch_after_sigkill_of_launcher_leaves_no_rank_without_environment(
    launch: Launch, pipe: Pipe, wait_until_gone: Callable[..., None]
) -> None:
    source = f"""
        import os, sys

        code = 'import os, signal; print(os.getpid(), file=open("{launch.directory}/pipe", "w"))'
        os.execve(sys.executable, [sys.executable, "-c", code + "; signal.pause()"], {{}})
        """
    with launch.start(source) as process:
        pids = [int(pid) for _ in range(2) for pid in pipe.receive(process)]
        process.kill()
        wait_until_gone(pids)


def test_launch_with_suspended_and_killed_rank_names_the_signal(launch: Launch, pipe: Pipe) -> None:
    source = f"""
        import os, signal

        if os.environ["RANK"] == "1":
            print(os.getpid(), file=open({str(launch.directory / "pipe")!r}, "w"))
        signal.pause()
        """
    with launch.start(source) as process:
        (pid,) = map(int, pipe.receive(process))
        os.kill(pid, signal.SIGSTOP)
        attach(launch.directory / "run").diagnose()  # a request that the rank does not read
        os.kill(pid, signal.SIGKILL)
        done = launch.wait_for_end(process)
    assert done.code == 137
    assert "rank 1: program died: killed by SIGKILL" in done.err


def test_launch_with_failed_rank_kills_rank_that_ignores_sigterm(
    launch: Launch, wait_until_gone: Callable[..., None]
) -> None:
    done = launch(
        """
        import os, signal, time
        from drawbar import train

        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pids = train.collective.all_gather(os.getpid())
        if os.environ["RANK"] == "0":
            print(*pids, flush=True)
            os._exit(4)
        while True:
            signal.pause()
        """
    )
    assert done.code == 4, done.err
    wait_until_gone([int(pid) for pid in done.out.split()])


def test_stacks_and_stop_of_local_launch_reach_its_scripts(launch: Launch, pipe: Pipe) -> None:
    source = f"""
        import pandas  # the ranks are forked
        import signal
        from drawbar import train

        def wait_for_request():
            with open({str(launch.directory / "pipe")!r}, "w") as file:
                print("waits", file=file)
            signal.pause()

        wait_for_request()
        """
    with launch.start(source) as process:
        for _ in range(2):
            pipe.receive(process)
        run = str(launch.directory / "run")
        drawbar = [sys.executable, "-m", "drawbar.cli"]
        stacks = json.loads(subprocess.check_output([*drawbar, "stacks", run, "--json"]))
        assert str(stacks).count("in wait_for_request") >= 2
        shown = subprocess.check_output([*drawbar, "stacks", run], text=True)
        frames = re.findall(r"^  File .* in (\w+|<module>)$", shown, re.MULTILINE)
        assert frames == ["<module>", "wait_for_request"] * 2
        every_thread = subprocess.check_output([*drawbar, "stacks", run, "--all"], text=True)
        assert every_thread.count("\nThread ") > shown.count("\nThread ") == 2
        subprocess.run([*drawbar, "stop", "--now", run], check=True)
        done = launch.wait_for_end(process)
    assert done.code == 0, done.err
    assert runs.find_run(done.run).status == "stopped"


def test_sigterm_of_launch_saves_same_step_on_all_ranks(launch: Launch, pipe: Pipe) -> None:
    source = f"""
        from drawbar import train

        rank, step = train.get_context().get_world_rank(), 0
        while True:
            step += 1
            if step == 5:
                with open({str(launch.directory / "pipe")!r}, "w") as file:
                    print(rank, file=file)
            if train.should_checkpoint():
                with train.checkpoint_dir() as path:
                    (path / f"rank_{{rank}}").write_text(str(step))
                    train.report({{"step": step}}, checkpoint=path)
        """
    with launch.start(source) as process:
        for _ in range(2):
            pipe.receive(process)
        process.terminate()
        done = launch.wait_for_end(process)
    assert done.code == 143, done.err
    checkpoint = done.run / "checkpoint_000000"
    steps = {int((checkpoint / f"rank_{rank}").read_text()) for rank in (0, 1)}
    assert len(steps) == 1


def test_launch_with_more_processes_than_cores_starts_all(launch: Launch) -> None:
    source = """
        import os
        from drawbar import train
        print(len(train.collective.all_gather(os.getpid())), os.environ["OMP_NUM_THREADS"])
        """
    done = launch(source, "--nproc_per_node=2", "--nproc-per-node", str(CORES + 1))
    assert (done.code, done.out) == (0, f"{CORES + 1} 1\n".encode()), done.err


def test_launch_elastic_starts_workers_that_fit(launch: Launch) -> None:
    source = "import os; print(os.environ['WORLD_SIZE'])"
    done = launch(source, "--num-workers", f"1:{CORES + 3}")
    assert (done.code, done.out) == (0, f"{CORES}\n".encode()), done.err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--num-workers", str(CORES + 1)], f"at most {CORES} fit"),
        (["--use-gpu"], "needs GPU=1, but no node of this cluster has the resource 'GPU'"),
        pytest.param(
            ["--nproc_per_node=2", "--nproc-per-node", "gpu"],
            "--nproc-per-node gpu found no device",
            marks=pytest.mark.nightly,
        ),
        (["--nproc_per_node=2", "--nproc-per-node", str(10**11)], "Cannot start 100000000000"),
    ],
)
def test_launch_without_room_prints_one_line_error(
    launch: Launch, options: list[str], expected: str
) -> None:
    done = launch("", *options, CUDA_VISIBLE_DEVICES="")
    assert (done.code, done.out) == (2, b"")
    assert expected in done.err
    assert done.err.count("\n") == 1


def test_launch_with_gpus_shows_every_rank_the_gpus_of_the_run(launch: Launch) -> None:
    source = """
        import os
        from drawbar import train
        gpu = train.get_context().get_accelerator_ids()
        print(train.collective.all_gather((gpu, os.environ["CUDA_VISIBLE_DEVICES"])))
        """
    done = launch(source, CUDA_VISIBLE_DEVICES="5,3,4")
    assert done.out == b"[(('3',), '3,5'), (('5',), '3,5')]\n", done.err


def test_launch_uses_running_ray_and_ignores_dead_one(
    launch: Launch, ray_cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The cluster requires the token in the home directory. Ray has set this variable here.
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    source = """
        import os
        print(open(f"/proc/{os.getppid()}/cmdline").read().startswith("ray::"))
        """
    address_file = launch.directory / "ray" / "ray_current_cluster"
    address_file.parent.mkdir()
    address_file.write_text(ray.get_runtime_context().gcs_address)
    done = launch(source, "--resume", "never")
    assert (done.code, done.out) == (0, b"True\n"), done.err
    address_file.write_text("127.0.0.1:1")  # no process listens
    done = launch(source, "--name", "other")
    assert (done.code, done.out) == (0, b"False\n"), done.err


@pytest.mark.parametrize("setting", [{"detached": True}, {"worker_runtime_env": {"pip": ["x"]}}])
def test_script_trainer_without_ray_rejects_settings_of_ray(setting: dict[str, bool]) -> None:
    (name,) = setting
    with pytest.raises(ValueError, match=f"use_ray=False does not support RunConfig.{name}"):
        ScriptTrainer(__file__, use_ray=False, run_config=train.RunConfig(**setting))  # type: ignore[arg-type]  # one setting per case


def test_script_trainer_without_ray_leaves_other_children_of_its_process(
    tmp_path: Path, pipe: Pipe, wait_until_gone: Callable[..., None]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, signal\n"
        f"with open({str(tmp_path / 'pipe')!r}, 'w') as file: print(os.getpid(), file=file)\n"
        "signal.pause()\n"
    )
    code = f"""
import subprocess
from drawbar import train
from drawbar.launch import ScriptTrainer
config = train.RunConfig(storage_path={str(tmp_path)!r})
run = ScriptTrainer({str(script)!r}, use_ray=False, run_config=config).start()
other = subprocess.Popen(["sleep", "600"])
print(other.pid, flush=True)
run.wait()
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        other = int(process.stdout.readline())
        (pid,) = pipe.receive(process)
        process.kill()
        wait_until_gone([int(pid)])
    os.kill(other, signal.SIGKILL)  # raises ProcessLookupError if it was killed too


def test_launch_counts_time_from_the_start_of_the_script_and_names_its_process(
    launch: Launch,
) -> None:
    launched = launch(
        """
        import os, time
        start = time.time()
        while time.process_time() < 1.0:  # work before the first call of Drawbar
            pass
        from drawbar import train
        train.report({"pid": os.getpid(), "seconds": time.time() - start})
        if train.get_context().get_world_rank() == 1:
            raise ValueError("broken")
        train.collective.barrier()
        """
    )
    record = runs.find_run(launched.run)
    row = next(row for row in record.list_report_rows() if row["rank"] == 1)
    assert f"pid {row['pid']} on " in launched.err
    times = record.read_rank_times()[-1].ranks[1]
    assert times.seconds["function"] >= row["seconds"] >= 1


def test_stalled_script_is_named_with_its_process_and_commands_that_inspect_it(
    launch: Launch, pipe: Pipe, capfd: pytest.CaptureFixture[str]
) -> None:
    launch.script.write_text(
        f"""
import os, signal
from drawbar import train
if os.environ["RANK"] == "1":
    with open({str(launch.directory / "pipe")!r}, "w") as file:
        print(os.getpid(), file=file)
    signal.pause()
train.collective.barrier()
"""
    )
    run = ScriptTrainer(
        launch.script,
        use_ray=False,
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            "run",
            str(launch.directory),
            failure_config=train.FailureConfig(stall_warning_after=0.5),
        ),
    ).start()
    (pid,) = pipe.receive()
    while not run.stalled_ranks:
        assert not run.is_done
        threading.Event().wait(0.01)
    run.stop(save=False)
    run.wait()
    text = capfd.readouterr().err
    assert f"run drawbar stacks {launch.directory}/run; for this rank, run py-spy dump " in text
    assert f"--pid {pid} on " in text
    page = ui.export_html([launch.directory / "run"], launch.directory / "run.html")
    assert re.search(rf'"pid": ?{pid}\b', page.read_text())


def test_launch_and_commands_about_its_run_name_options(launch: Launch) -> None:
    options = ["--tee", "3", "--local-ranks-filter", "0,1"]
    failed = launch("raise ValueError", *options, script=("script.py", "--hf-token", "abc"))
    path = shlex.quote(str(launch.directory))
    hint = f"run the command again with --name 'run' --storage-path '{launch.directory}'"
    shown = subprocess.run(
        [sys.executable, "-m", "drawbar.cli", "show", failed.run],
        env={**os.environ, "COLUMNS": "1000"},
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    assert "restarts are off. --max-failures 3 allows 3" in shown
    assert hint in shown
    assert re.search(r"command +--tee 3 --local-ranks-filter 0,1 script.py --hf-token <", shown)
    assert not re.search(r"TorchrunOptions|abc|(Run|Failure|Scaling)Config", shown)
    page = ui.export_html([failed.run], launch.directory / "run.html").read_text()
    assert f"--name run --storage-path {path}" in page
    again = launch("", "--resume", "never")
    assert "drawbar: error: --resume never, but" in again.err


def test_launch_with_time_limits_saves_and_exits_with_zero(launch: Launch) -> None:
    done = launch(
        """
        from drawbar import train
        while not train.should_checkpoint():
            train.collective.barrier()
        with train.checkpoint_dir() as path:
            train.report({}, checkpoint=path)
        while True:
            train.collective.barrier()
        """,
        *("--max-time", "0.2", "--stop-before", "600"),
    )
    assert done.code == 0, done.err
    assert "warning: Ignoring --stop-before 600: SLURM_JOB_END_TIME is not set" in done.err
    record = runs.find_run(done.run)
    assert record.status == "stopped"
    assert len(record.list_checkpoints()) == 1


def test_restart_count_of_new_command_begins_at_zero(launch: Launch) -> None:
    source = """
        import os
        print(os.environ["TORCHELASTIC_RESTART_COUNT"])
        raise ValueError
        """
    launch.num_workers = 1
    options = ("--max-failures", "1", "--no-stop-when-deterministic")
    outputs = [launch(source, *options).out for _ in range(2)]
    assert outputs == [b"0\n1\n"] * 2
