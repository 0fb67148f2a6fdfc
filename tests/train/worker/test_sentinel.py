"""Real processes die here; what the sentinel says of them and does to their children is checked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from drawbar.train._worker import sentinel as _sentinel
from drawbar.train._worker_group.exit_status import (
    ExitReport,
    describe_exit,
    read_exit_report,
    wait_for_exit_report,
)


def run_worker(code: str, report_file: Path, before_start: str = "") -> subprocess.Popen[str]:
    """Start a worker with a sentinel beside it; `code` may use os, subprocess, sys and hold()."""
    prelude = (
        "import faulthandler, os, subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from drawbar.train._worker import sentinel as _sentinel\n"
        f"faulthandler.enable(open({str(report_file)!r} + '.fault', 'w'))\n"
        "def hold(*pids): print(*pids, flush=True); time.sleep(60)\n"
        f"{before_start}\n"
        f"_sentinel.start(Path({str(report_file)!r}))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code], stdout=subprocess.PIPE, text=True
    )


def report_of(report_file: Path) -> ExitReport:
    report = asyncio.run(wait_for_exit_report(report_file, timeout_s=10))
    assert report is not None
    return report


def first_line(worker: subprocess.Popen[str]) -> list[int]:
    """Wait for the pids that hold() prints."""
    assert worker.stdout is not None
    return [int(pid) for pid in worker.stdout.readline().split()]


def end(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    worker.communicate()


def wait_until_gone(pids: list[int]) -> None:
    """Wait at most 5 s for each process to end."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            assert select.select([pidfd], [], [], 5)[0], f"process {pid} lives"
            os.close(pidfd)


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("os.kill(os.getpid(), 9)", "killed by SIGKILL, from outside"),
        ("os._exit(137)", "exited with code 137 by os._exit or sys.exit"),
        ("os.kill(os.getpid(), 15)", "killed by SIGTERM"),
        ("faulthandler._sigsegv()", "killed by SIGSEGV: Fatal Python error: Segmentation fault"),
    ],
)
def test_the_verdict_names_the_signal_or_the_exit_code(
    code: str, expected: str, tmp_path: Path
) -> None:
    report_file = tmp_path / "exit.json"
    run_worker(code, report_file).communicate()
    fault_log = Path(f"{report_file}.fault").read_text()
    assert describe_exit(report_of(report_file), "", fault_log).startswith(expected)


def test_a_crash_is_told_with_the_line_of_python_that_crashed(tmp_path: Path) -> None:
    report_file = tmp_path / "exit.json"
    run_worker("faulthandler._sigsegv()", report_file).communicate()
    said = describe_exit(report_of(report_file), "", Path(f"{report_file}.fault").read_text())
    assert 'File "<string>", line 8 in <module>' in said


def test_a_killed_worker_takes_all_its_descendants_along(tmp_path: Path) -> None:
    worker = run_worker(
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "same_group = subprocess.Popen(sleep).pid\n"
        "own_session = subprocess.Popen(sleep, start_new_session=True).pid\n"
        "forked = os.fork()\n"
        "if not forked: os.setsid(); time.sleep(60)\n"
        "hold(same_group, own_session, forked)",
        tmp_path / "exit.json",
    )
    pids = first_line(worker)
    assert len(pids) == 3
    assert all(psutil.pid_exists(pid) for pid in pids)
    end(worker)
    wait_until_gone(pids)


def beside(worker: subprocess.Popen[str]) -> list[psutil.Process]:
    """Find the sentinel of this worker, in any stage of its start."""
    wanted = {_sentinel.__file__, str(worker.pid)}
    processes = psutil.process_iter(["cmdline"])
    return [process for process in processes if wanted <= set(process.info["cmdline"] or [])]


def test_the_sentinel_is_no_child_of_the_worker_and_ends_with_it(tmp_path: Path) -> None:
    worker = run_worker(
        "import psutil, threading\n"
        "[t.join() for t in threading.enumerate() if t.name == 'drawbar-sentinel']\n"
        "hold(*(child.pid for child in psutil.Process().children()))",
        tmp_path / "exit.json",
    )
    assert first_line(worker) == []
    (sentinel,) = beside(worker)
    end(worker)
    wait_until_gone([sentinel.pid])


def test_without_a_pidfd_the_pipe_tells_of_the_death(tmp_path: Path) -> None:
    worker = run_worker("hold()", tmp_path / "exit.json", before_start="del os.pidfd_open")
    first_line(worker)
    end(worker)
    assert report_of(tmp_path / "exit.json").pid == worker.pid


def test_a_normal_end_is_reported_too(tmp_path: Path) -> None:
    worker = run_worker("", tmp_path / "exit.json")
    worker.communicate()
    report = report_of(tmp_path / "exit.json")
    assert report.pid == worker.pid
    assert describe_exit(report, "", "") == "exited with code 0 by os._exit or sys.exit"


def report(status: int | None, *, oom_kill: bool | None = False) -> ExitReport:
    return ExitReport(pid=1, status=status, time=0.0, oom_kill=oom_kill, rss=3_100_000_000)


def test_the_kernels_oom_killer_is_named() -> None:
    assert describe_exit(report(9, oom_kill=True), "", "") == (
        "killed by SIGKILL, by the kernel's OOM killer: "
        "the cgroup's oom_kill count rose, last RSS 3.1 GB"
    )


def test_rays_memory_monitor_is_named_in_rays_words() -> None:
    detail = (
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: "
        "10.0.0.1, ID: ee) was 22.9GB used / 23.5GB limit (0.97)\nOOM kill reason: threshold"
    )
    assert describe_exit(report(9), detail, "") == (
        "killed by Ray's memory monitor: Memory on the node (IP: 10.0.0.1, ID: ee) was 22.9GB used "
        "/ 23.5GB limit (0.97)"
    )


def test_rays_guess_about_the_oom_killer_is_not_believed() -> None:
    guess = "Some common causes include: (1) the process was killed by the OOM killer due to ..."
    assert describe_exit(None, guess, "").startswith("vanished without a trace")


def test_a_crash_without_a_status_is_known_from_faulthandler() -> None:
    fault_log = "Fatal Python error: Aborted\n\nThread 0x1:\n  File train.py, line 3 in step"
    assert describe_exit(report(None), "", fault_log) == f"killed by SIGABRT: {fault_log}"


def test_a_log_without_a_crash_is_not_quoted() -> None:
    said = describe_exit(report(11), "", "epoch 1\nepoch 2\n")
    assert said == "killed by SIGSEGV"


def test_the_account_of_a_crash_is_short() -> None:
    lines = "".join(f"  File train.py, line {line} in step\n" for line in range(100))
    stacks = f"Thread 0x1:\n{lines}\nCurrent thread 0x2:\n  File c.py, line 3 in call\n"
    fault_log = f"epoch 1\nFatal Python error: Bus error\n\n{stacks}\nExtension modules: numpy"
    told = describe_exit(report(7), "", fault_log).splitlines()
    assert len(told) == 40
    assert told[2:4] == ["Current thread 0x2:", "  File c.py, line 3 in call"]


def test_without_a_status_the_oom_count_still_speaks() -> None:
    said = describe_exit(report(None, oom_kill=True), "", "")
    assert said.startswith("vanished, probably killed, by the kernel's OOM killer")


def test_no_report_is_none_and_not_an_error(tmp_path: Path) -> None:
    assert read_exit_report(tmp_path / "exit.json") is None
    assert asyncio.run(wait_for_exit_report(tmp_path / "exit.json", timeout_s=0.01)) is None
