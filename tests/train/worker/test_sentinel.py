"""Tests of the sentinel with real worker processes, and of exit descriptions."""

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

from drawbar._process import sentinel as _sentinel
from drawbar._process.exit_status import (
    ExitReport,
    describe_exit,
    read_exit_report,
    wait_for_exit_report,
)


def run_worker(code: str, report_file: Path, before_start: str = "") -> subprocess.Popen[str]:
    """Start a worker with a sentinel. `code` can use os, subprocess, sys, and hold()."""
    prelude = (
        "import faulthandler, os, subprocess, sys, time\n"
        "from pathlib import Path\n"
        "from drawbar._process import sentinel as _sentinel\n"
        f"faulthandler.enable(open({str(report_file)!r} + '.fault', 'w'))\n"
        "def hold(*pids): print(*pids, flush=True); time.sleep(60)\n"
        f"{before_start}\n"
        f"_sentinel.start(Path({str(report_file)!r}))\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", prelude + code], stdout=subprocess.PIPE, text=True
    )


def wait_for_report(report_file: Path) -> ExitReport:
    report = asyncio.run(wait_for_exit_report(report_file, timeout_s=10))
    assert report is not None
    return report


def read_pids(worker: subprocess.Popen[str]) -> list[int]:
    """Wait for the pids that hold() prints and return them."""
    assert worker.stdout is not None
    return [int(pid) for pid in worker.stdout.readline().split()]


def kill_worker(worker: subprocess.Popen[str]) -> None:
    worker.kill()
    worker.communicate()


def wait_for_exit(pids: list[int]) -> None:
    """Wait at most 5 s for each process to end."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            assert select.select([pidfd], [], [], 5)[0], f"process {pid} is alive"
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
def test_describe_exit_names_signal_or_exit_code(code: str, expected: str, tmp_path: Path) -> None:
    report_file = tmp_path / "exit.json"
    run_worker(code, report_file).communicate()
    fault_log = Path(f"{report_file}.fault").read_text()
    assert describe_exit(wait_for_report(report_file), "", fault_log).startswith(expected)


def test_describe_exit_of_crash_contains_python_line(tmp_path: Path) -> None:
    report_file = tmp_path / "exit.json"
    run_worker("faulthandler._sigsegv()", report_file).communicate()
    description = describe_exit(
        wait_for_report(report_file), "", Path(f"{report_file}.fault").read_text()
    )
    assert 'File "<string>", line 8 in <module>' in description


def test_sentinel_after_sigkill_kills_all_descendants(tmp_path: Path) -> None:
    worker = run_worker(
        "sleep = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "same_group = subprocess.Popen(sleep).pid\n"
        "new_session = subprocess.Popen(sleep, start_new_session=True).pid\n"
        "forked = os.fork()\n"
        "if not forked: os.setsid(); time.sleep(60)\n"
        "hold(same_group, new_session, forked)",
        tmp_path / "exit.json",
    )
    pids = read_pids(worker)
    assert len(pids) == 3
    assert all(psutil.pid_exists(pid) for pid in pids)
    kill_worker(worker)
    wait_for_exit(pids)


def find_sentinels(worker: subprocess.Popen[str]) -> list[psutil.Process]:
    """Return the sentinel processes of this worker, at any stage of their start."""
    arguments = {_sentinel.__file__, str(worker.pid)}
    processes = psutil.process_iter(["cmdline"])
    return [process for process in processes if arguments <= set(process.info["cmdline"] or [])]


def test_sentinel_is_not_a_child_of_the_worker_and_ends_with_it(tmp_path: Path) -> None:
    worker = run_worker(
        "import psutil, threading\n"
        "[t.join() for t in threading.enumerate() if t.name == 'drawbar-sentinel']\n"
        "hold(*(child.pid for child in psutil.Process().children()))",
        tmp_path / "exit.json",
    )
    assert read_pids(worker) == []
    (sentinel,) = find_sentinels(worker)
    kill_worker(worker)
    wait_for_exit([sentinel.pid])


def test_sentinel_without_pidfd_detects_death_by_pipe(tmp_path: Path) -> None:
    worker = run_worker("hold()", tmp_path / "exit.json", before_start="del os.pidfd_open")
    read_pids(worker)
    kill_worker(worker)
    assert wait_for_report(tmp_path / "exit.json").pid == worker.pid


def test_sentinel_reports_normal_exit(tmp_path: Path) -> None:
    worker = run_worker("", tmp_path / "exit.json")
    worker.communicate()
    report = wait_for_report(tmp_path / "exit.json")
    assert report.pid == worker.pid
    assert describe_exit(report, "", "") == "exited with code 0 by os._exit or sys.exit"


def report(status: int | None, *, oom_kill: bool | None = False) -> ExitReport:
    return ExitReport(pid=1, status=status, time=0.0, oom_kill=oom_kill, rss=3_100_000_000)


def test_describe_exit_names_kernel_oom_killer() -> None:
    assert describe_exit(report(9, oom_kill=True), "", "") == (
        "killed by SIGKILL, by the kernel's OOM killer: "
        "the cgroup's oom_kill count rose, last RSS 3.1 GB"
    )


def test_describe_exit_quotes_ray_memory_monitor() -> None:
    detail = (
        "1 worker(s) were killed due to the node running low on memory. Memory on the node (IP: "
        "10.0.0.1, ID: ee) was 22.9GB used / 23.5GB limit (0.97)\nOOM kill reason: threshold"
    )
    assert describe_exit(report(9), detail, "") == (
        "killed by Ray's memory monitor: Memory on the node (IP: 10.0.0.1, ID: ee) was 22.9GB used "
        "/ 23.5GB limit (0.97)"
    )


def test_describe_exit_ignores_generic_oom_hint_of_ray() -> None:
    guess = "Some common causes include: (1) the process was killed by the OOM killer due to ..."
    assert describe_exit(None, guess, "").startswith("for an unknown reason")


def test_describe_exit_without_status_uses_faulthandler_output() -> None:
    fault_log = "Fatal Python error: Aborted\n\nThread 0x1:\n  File train.py, line 3 in step"
    assert describe_exit(report(None), "", fault_log) == f"killed by SIGABRT: {fault_log}"


def test_describe_exit_does_not_quote_log_without_crash() -> None:
    description = describe_exit(report(11), "", "epoch 1\nepoch 2\n")
    assert description == "killed by SIGSEGV"


def test_describe_exit_truncates_long_stacks() -> None:
    lines = "".join(f"  File train.py, line {line} in step\n" for line in range(100))
    stacks = f"Thread 0x1:\n{lines}\nCurrent thread 0x2:\n  File c.py, line 3 in call\n"
    fault_log = f"epoch 1\nFatal Python error: Bus error\n\n{stacks}\nExtension modules: numpy"
    lines_shown = describe_exit(report(7), "", fault_log).splitlines()
    assert len(lines_shown) == 40
    assert lines_shown[2:4] == ["Current thread 0x2:", "  File c.py, line 3 in call"]


def test_describe_exit_without_status_uses_oom_count() -> None:
    description = describe_exit(report(None, oom_kill=True), "", "")
    assert description.startswith("probably killed, by the kernel's OOM killer")


def test_read_exit_report_without_file_returns_none(tmp_path: Path) -> None:
    assert read_exit_report(tmp_path / "exit.json") is None
    assert asyncio.run(wait_for_exit_report(tmp_path / "exit.json", timeout_s=0.01)) is None
