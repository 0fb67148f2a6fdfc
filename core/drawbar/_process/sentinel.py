"""Sentinel process that reports a worker's exit status and kills its orphans.

For a dead actor, Ray does not distinguish SIGKILL, `os._exit`, and the kernel's OOM killer, and it
does not end the DataLoader workers of a killed worker. A process that outlives the worker does
both. `start()` runs in the worker. `main()` and its helpers run in the sentinel, which executes
this file in a bare interpreter (`-I -S -E`), so that it starts in about 10 ms and uses 9 MB. For
this reason, the file imports only a few modules of the standard library.

A driver whose ranks are child processes has a sentinel too (`start_for_driver`). When the driver
ends, it kills the ranks and their descendants, and nothing else.

The descendants of a worker are found by properties that they inherit: its process group; a marker
in the environment of processes that were exec'ed; and the write end of a pipe in processes that
were only forked (their `/proc/<pid>/environ` is the initial one of the worker, without the marker).
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import struct
import sys
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

WORKER_MARKER_VARIABLE = "DRAWBAR_WORKER"

_MEMORY_SAMPLE_MS = 1000  # interval at which the worker's memory is read
_REAP_TIMEOUT_S = 2.0  # limit for the worker's parent to reap it
_NO_DESCRIPTOR = -1
_ORPHAN_SCANS = 20  # scan repeatedly, because an orphan may fork during a scan

# include/uapi/linux/pidfd.h. Linux 6.15 and later return the exit status of a reaped process.
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE_OFFSET = 60


def start(report_file: Path) -> None:
    """Start a sentinel for this process. Takes about 10 ms.

    Must be called once, before user code runs. The process becomes the leader of its process group,
    and `DRAWBAR_WORKER` is set in its environment. When the process ends, for any reason, the
    sentinel writes `report_file` within milliseconds (see
    `drawbar._process.exit_status`) and kills the process group and other descendants.

    Args:
        report_file: Path of the exit report. Its directory is created.

    Raises:
        OSError: The directory of `report_file` cannot be created, or the sentinel cannot be
            started.
    """
    # The process group will be killed, so it must contain the children of this worker, and no
    # other worker.
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    report_file.parent.mkdir(parents=True, exist_ok=True)
    report_file.unlink(missing_ok=True)  # report of an earlier process with this pid
    os.environ[WORKER_MARKER_VARIABLE] = marker = _make_marker()
    # Not at the top: the sentinel executes this file without Drawbar.
    from drawbar._process.batch_counter import share_counter

    batches = share_counter()
    _start_process(str(report_file.absolute()), marker, batches)
    if batches != _NO_DESCRIPTOR:
        os.close(batches)


_driver_markers: dict[int, str] = {}  # by process ID: a forked child starts another sentinel


def start_for_driver() -> dict[str, str]:
    """Start a sentinel that kills the ranks of this process when it dies, unless there is one.

    The process keeps its process group, and its other child processes are not killed.

    Returns:
        Environment variables that mark a process as a rank.

    Raises:
        OSError: The sentinel cannot be started.
    """
    marker = _driver_markers.get(os.getpid())
    if marker is None:
        marker = _make_marker()
        _start_process("", marker)
        _driver_markers[os.getpid()] = marker
    return {WORKER_MARKER_VARIABLE: marker}


def _make_marker() -> str:
    return f"{os.getpid()}-{os.urandom(8).hex()}"


def _start_process(report_file: str, marker: str, batches: int = -1) -> None:
    """Start the sentinel. `report_file` is empty for the sentinel of a driver.

    `batches` is the descriptor of the memory with the worker's count of batches.
    """
    import subprocess
    import threading

    reader, _pipe_writer = os.pipe()
    pidfd = _open_pidfd()
    # Without site, PYTHON* variables, and the user's paths, so that it starts fast and does not run
    # other code.
    command = [sys.executable, "-I", "-S", "-E", os.path.abspath(__file__)]
    # In a new session, so that neither Ctrl-C in the terminal nor the kill of the process group
    # reaches it; in /, so that it does not keep a filesystem busy.
    process = subprocess.Popen(
        [*command, str(os.getpid()), report_file, marker, str(pidfd), str(batches)],
        stdin=reader,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=[number for number in (pidfd, batches) if number != _NO_DESCRIPTOR],
        start_new_session=True,
        cwd="/",
    )
    os.close(reader)
    if pidfd != _NO_DESCRIPTOR:
        os.close(pidfd)
    # The sentinel forks once and its first process exits: reap that one.
    threading.Thread(target=process.wait, name="drawbar-sentinel", daemon=True).start()


def _open_pidfd() -> int:
    """Open a pidfd of this process. Unlike a pid, it is never reused."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # not Linux, or older than 5.3
        return _NO_DESCRIPTOR


def main(pid: int, report_file: str, marker: str, pidfd: int, batches: int) -> None:
    """Wait until the process `pid` ends, kill its descendants, and write the report.

    For a driver, `report_file` is empty. Then only the processes with the marker are killed.
    `pidfd` and `batches` are descriptors, or -1.
    """
    if os.fork():
        # Ray kills the children of an exiting worker, so the sentinel must not be its child.
        os._exit(0)
    if not report_file:
        _wait_for_death(pid, pidfd)
        kill_orphans(f"{WORKER_MARKER_VARIABLE}={marker}")
        return
    oom_kills = OomKillCounter(pid)
    rss = _wait_for_death(pid, pidfd)
    died_at = time.time()
    # Kill the group first: its processes may hold the worker's GPUs and ports, and Ray does not
    # clean up after a killed worker (ray-project/ray#42861).
    _kill(-pid)
    report = {
        "pid": pid,
        "status": _read_exit_status(pid, pidfd),
        "time": died_at,
        "oom_kill": oom_kills.has_increased(),
        "rss": rss,
        "num_batches": _read_number(batches),
    }
    _write_report(report_file, report)
    pipe = os.readlink("/proc/self/fd/0") if _has_procfs() else ""
    kill_orphans(f"{WORKER_MARKER_VARIABLE}={marker}", pipe)


def _wait_for_death(pid: int, pidfd: int) -> int | None:
    """Block until the worker ends and return its last known resident memory in bytes.

    Without a pidfd, the end of the worker's pipe signals its death. Because forked children keep
    the pipe open too, the pid is also checked once per memory sample.
    """
    poller = select.poll()
    poller.register(0 if pidfd == _NO_DESCRIPTOR else pidfd, select.POLLIN)
    rss = _read_resident_bytes(pid)
    while not poller.poll(_MEMORY_SAMPLE_MS):
        rss = _read_resident_bytes(pid) or rss
        if pidfd == _NO_DESCRIPTOR and not _is_alive(pid):
            break
    return rss


def _read_resident_bytes(pid: int) -> int | None:
    statm = _read(f"/proc/{pid}/statm").split()
    return int(statm[1]) * os.sysconf("SC_PAGE_SIZE") or None if statm else None


def _read_number(descriptor: int) -> int | None:
    """Return the count of batches in shared memory, or None if there is none."""
    try:
        return int(struct.unpack("q", os.pread(descriptor, 8, 0))[0])
    except (OSError, struct.error):
        return None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _read_exit_status(pid: int, pidfd: int) -> int | None:
    """Return the wait status of the ended process, or None if the kernel does not provide it.

    Before the parent reaps the process, it is the last field of `/proc/<pid>/stat` (proc(5));
    afterwards the pidfd provides it.
    """
    # The second field is the name, which may contain spaces and parentheses.
    stat = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if stat and stat[0] == "Z":
        return int(stat[-1])
    # Poll: the pidfd provides the status only after the parent has reaped the process, and there
    # is no event for that.
    deadline = time.monotonic() + _REAP_TIMEOUT_S
    while pidfd != _NO_DESCRIPTOR and time.monotonic() < deadline:
        info = bytearray(128)
        struct.pack_into("Q", info, 0, _PIDFD_INFO_EXIT)
        try:
            fcntl.ioctl(pidfd, _PIDFD_GET_INFO, info)
        except OSError:
            return None
        if struct.unpack_from("Q", info, 0)[0] & _PIDFD_INFO_EXIT:
            return int(struct.unpack_from("i", info, _EXIT_CODE_OFFSET)[0])
        time.sleep(0.002)
    return None


class OomKillCounter:
    """Counter of OOM kills since its creation, in a process's cgroup or on the machine."""

    def __init__(self, pid: int) -> None:
        self._file = _find_oom_file(pid)
        self._initial_count = _read_oom_kills(self._file)

    def has_increased(self) -> bool | None:
        """Return whether there was a kill, or None if the kernel does not count them."""
        return (
            None
            if self._initial_count is None
            else _read_oom_kills(self._file) != self._initial_count
        )


def _find_oom_file(pid: int) -> str:
    """Return the file that counts OOM kills, of the worker's cgroup or of the machine."""
    cgroup_files = []
    for line in _read(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            cgroup_files.append(f"/sys/fs/cgroup{path}/memory.events")
        elif "memory" in controllers.split(","):
            cgroup_files.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    roots = ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"]
    candidates = [*cgroup_files, *roots, "/proc/vmstat"]
    return next((path for path in candidates if _read_oom_kills(path) is not None), "")


def _read_oom_kills(path: str) -> int | None:
    for line in _read(path).splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None


def kill_orphans(env_entry: str, pipe: str = "") -> None:
    """Kill the descendants that left the process group, such as a daemon in its own session.

    Args:
        env_entry: Entry `NAME=VALUE` in the environment of descendants.
        pipe: Name of a pipe that descendants have open, as in `/proc/<pid>/fd`.
    """
    # An orphan may start another process between the scan and the kill.
    for _ in range(_ORPHAN_SCANS):
        orphans = _find_orphans(env_entry, pipe)
        if not orphans:
            return
        for pid in orphans:
            _kill(pid)
        time.sleep(0.01)


def _has_procfs() -> bool:
    return os.path.isdir("/proc/self/fd")


def _find_orphans(env_entry: str, pipe: str) -> list[int]:
    if not _has_procfs():
        return []
    pids = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [
        pid
        for pid in pids
        if pid != os.getpid()
        # Check both: a program may clear its environment, and a daemon closes inherited files.
        and (
            env_entry in _read(f"/proc/{pid}/environ").split("\0")
            or (pipe and _has_pipe_open(pid, pipe))
        )
    ]


def _has_pipe_open(pid: int, pipe: str) -> bool:
    directory = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            with contextlib.suppress(OSError):
                if os.readlink(f"{directory}/{name}") == pipe:
                    return True
    return False


def _kill(pid: int) -> None:
    """Send SIGKILL to a process, or with -pid to a process group, if it still exists."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _write_report(report_file: str, report: Mapping[str, object]) -> None:
    """Write the report atomically. Errors are ignored, because no process could handle them."""
    draft = f"{report_file}.{os.getpid()}.tmp"
    with contextlib.suppress(OSError):
        with open(draft, "w") as file:
            json.dump(report, file)
        os.replace(draft, report_file)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5]))
