"""A small process beside each worker: it tells how the worker died, and takes its children along.

Ray's account of a dead actor does not tell SIGKILL from `os._exit` from the kernel's OOM killer,
and nobody ends the DataLoader workers that a killed worker leaves behind. Both need somebody who is
there when the worker no longer is. `start()` is called inside the worker; `main()` and what it
calls run in the sentinel, which is this same file run by path in a bare interpreter (`-I -S -E`),
so that it starts in some 10 ms and holds 9 MB. Hence this file imports the standard library only,
and little of that.

The worker's descendants are found by what they cannot help inheriting: its process group; the
marker in the environment of whoever was exec'ed; the write end of a pipe in whoever was only forked
(whose `/proc/<pid>/environ` is that of the worker's own exec, without the marker).
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

_MEMORY_SAMPLE_MS = 1000  # how often the worker's memory is read
_REAP_TIMEOUT_S = 2.0  # how long the worker's parent may take to reap it
_NO_PIDFD = -1
_ORPHAN_SCANS = (
    20  # how often strays are looked for: one that was forking has a child at the next look
)

# include/uapi/linux/pidfd.h. The exit status is told since Linux 6.15, once the process was reaped.
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO_EXIT = 1 << 3
_EXIT_CODE_OFFSET = 60


def start(report_file: Path) -> None:
    """Put a sentinel beside this very process: once, early, in the worker. Takes some 10 ms.

    The process becomes the leader of its process group if it is not, and `DRAWBAR_WORKER` is set in
    its environment. However the process ends, `report_file` appears some milliseconds later (see
    `drawbar.train._worker_group.exit_status`), and its process group and other descendants are
    killed.

    Raises:
        OSError: The folder of `report_file` cannot be made, or no process can be started.
    """
    import subprocess
    import threading

    # The group will be killed as a whole: it must hold what this worker starts, and no other
    # worker.
    if os.getpgrp() != os.getpid():
        os.setpgid(0, 0)
    report_file.parent.mkdir(parents=True, exist_ok=True)
    report_file.unlink(missing_ok=True)  # that of an earlier process with this pid
    marker = f"{os.getpid()}-{os.urandom(8).hex()}"
    os.environ[WORKER_MARKER_VARIABLE] = marker
    reader, _pipe_writer = os.pipe()
    pidfd = _open_pidfd()
    # Without site, the user's paths and variables: it is up sooner, and nobody's code runs in it.
    command = [sys.executable, "-I", "-S", "-E", os.path.abspath(__file__)]
    # In a session of its own, out of reach of a Ctrl-C in the terminal and of the kill of the
    # group; in no folder, which somebody may want to unmount.
    process = subprocess.Popen(
        [*command, str(os.getpid()), str(report_file.absolute()), marker, str(pidfd)],
        stdin=reader,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        pass_fds=() if pidfd == _NO_PIDFD else (pidfd,),
        start_new_session=True,
        cwd="/",
    )
    os.close(reader)
    if pidfd != _NO_PIDFD:
        os.close(pidfd)
    # The sentinel forks once and its first process exits: reap that one.
    threading.Thread(target=process.wait, name="drawbar-sentinel", daemon=True).start()


def _open_pidfd() -> int:
    """Open a pidfd on this very process: it names no other one, however soon this one dies."""
    try:
        return os.pidfd_open(os.getpid())
    except (AttributeError, OSError):  # not Linux, or older than 5.3
        return _NO_PIDFD


def main(pid: int, report_file: str, marker: str, pidfd: int) -> None:
    """Watch the process `pid` until it ends, kill what it leaves, write the report, and return."""
    if os.fork():
        # An orphan is nobody's child: Ray kills a worker's children when the worker exits.
        os._exit(0)
    ooms = OomKillCounter(pid)
    rss = _wait_for_death(pid, pidfd)
    died_at = time.time()
    # Before anything is found out: what it has started may hold its GPUs and ports.
    # Ray does not clean up after a worker that was killed (ray-project/ray#42861).
    _kill(-pid)
    report = {
        "pid": pid,
        "status": _read_exit_status(pid, pidfd),
        "time": died_at,
        "oom_kill": ooms.has_increased(),
        "rss": rss,
    }
    _write_report(report_file, report)
    pipe = os.readlink("/proc/self/fd/0") if _has_procfs() else ""
    kill_orphans(f"{WORKER_MARKER_VARIABLE}={marker}", pipe)


def _wait_for_death(pid: int, pidfd: int) -> int | None:
    """Block until the worker ends; give its last known resident memory, in bytes.

    Without a pidfd the sign is the end of the pipe that the worker holds. A forked child holds it
    too, so the process is looked for once per sample as well.
    """
    poller = select.poll()
    poller.register(0 if pidfd == _NO_PIDFD else pidfd, select.POLLIN)
    rss = _read_resident_bytes(pid)
    while not poller.poll(_MEMORY_SAMPLE_MS):
        rss = _read_resident_bytes(pid) or rss
        if pidfd == _NO_PIDFD and not _is_alive(pid):
            break
    return rss


def _read_resident_bytes(pid: int) -> int | None:
    statm = _read(f"/proc/{pid}/statm").split()
    return int(statm[1]) * os.sysconf("SC_PAGE_SIZE") or None if statm else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def _read_exit_status(pid: int, pidfd: int) -> int | None:
    """Give the wait status of the ended process, or None where this kernel does not tell it.

    Until the parent reaps it, `/proc/<pid>/stat` tells (last field, proc(5)); afterwards the pidfd.
    """
    # The program's name is in parentheses, and may have blanks and parentheses itself.
    stat = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    if stat and stat[0] == "Z":
        return int(stat[-1])
    # By a poll: the pidfd tells the status only once the parent has reaped, and nothing tells of
    # that.
    deadline = time.monotonic() + _REAP_TIMEOUT_S
    while pidfd != _NO_PIDFD and time.monotonic() < deadline:
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
    """The OOM killer's victims in the cgroup of a process, or on the machine, from now on."""

    def __init__(self, pid: int) -> None:
        self._file = _find_oom_file(pid)
        self._before = _read_oom_kills(self._file)

    def has_increased(self) -> bool | None:
        """Whether there was one; None where they are not counted."""
        return None if self._before is None else _read_oom_kills(self._file) != self._before


def _find_oom_file(pid: int) -> str:
    """Find the file that counts the OOM killer's victims: the worker's cgroup, or the machine."""
    own = []
    for line in _read(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            own.append(f"/sys/fs/cgroup{path}/memory.events")
        elif "memory" in controllers.split(","):
            own.append(f"/sys/fs/cgroup/memory{path}/memory.oom_control")
    roots = ["/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"]
    candidates = [*own, *roots, "/proc/vmstat"]
    return next((path for path in candidates if _read_oom_kills(path) is not None), "")


def _read_oom_kills(path: str) -> int | None:
    for line in _read(path).splitlines():
        if line.startswith("oom_kill "):
            return int(line.split()[1])
    return None


def kill_orphans(env_entry: str, pipe: str = "") -> None:
    """Kill the descendants that left the process group, such as a daemon with its own session.

    They are those that have `setting` in their environment, or hold the pipe of this name.
    """
    # A stray may start another process between the look and the kill.
    for _ in range(_ORPHAN_SCANS):
        strays = _find_orphans(env_entry, pipe)
        if not strays:
            return
        for pid in strays:
            _kill(pid)
        time.sleep(0.01)


def _has_procfs() -> bool:
    return os.path.isdir("/proc/self/fd")


def _find_orphans(setting: str, pipe: str) -> list[int]:
    if not _has_procfs():
        return []
    others = (int(name) for name in os.listdir("/proc") if name.isdigit())
    return [
        pid
        for pid in others
        if pid != os.getpid()
        # By either: a program may clear its environment, and a daemon closes what it inherits.
        and (
            setting in _read(f"/proc/{pid}/environ").split("\0")
            or (pipe and _has_pipe_open(pid, pipe))
        )
    ]


def _has_pipe_open(pid: int, pipe: str) -> bool:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            with contextlib.suppress(OSError):
                if os.readlink(f"{folder}/{name}") == pipe:
                    return True
    return False


def _kill(pid: int) -> None:
    """SIGKILL a process, or with -pid a process group, that may be gone already."""
    with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)


def _read(path: str) -> str:
    try:
        with open(path, errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _write_report(report_file: str, report: Mapping[str, object]) -> None:
    """Make the report appear whole or not at all; nobody is left to tell if its folder is gone."""
    draft = f"{report_file}.{os.getpid()}.tmp"
    with contextlib.suppress(OSError):
        with open(draft, "w") as file:
            json.dump(report, file)
        os.replace(draft, report_file)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]))
