"""Command that Ray starts in place of a worker's Python interpreter.

Ray runs `COMMAND default_worker.py ARGUMENTS...`. This file passes the arguments, the environment,
the working directory, and the standard streams to the fork server of this node, which forks the
worker. It then waits for the worker and ends with its exit code or signal. If there is no server,
it starts one. If anything fails, it becomes an ordinary worker, and `ERROR_VARIABLE` states why.

The interpreter runs with `-I -S`, so that it starts in about 10 ms; for this reason, the file
imports only a few modules of the standard library.
"""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import select
import signal
import socket
import sys
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from typing import Any

ERROR_VARIABLE = "DRAWBAR_FORK_SERVER_ERROR"
"""Why a worker was not forked. `_process/imported_modules.py` has the name, too."""

SERVER_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "server.py")
# They differ between the processes of one node, and no import reads them. Ray reads its variables,
# such as the job's ID, when it is imported, so a server is of one job.
_VOLATILE_PREFIX = "DRAWBAR_"
VOLATILE_NAMES = ("PWD", "OLDPWD", "SHLVL", "_", "PYTEST_CURRENT_TEST")
_MAX_SOCKET_PATH = 100  # sun_path has 108 bytes
_ATTEMPTS = 3  # a server may end while a client connects
REPLY_TIMEOUT_S = 120
"""Time limit for the first reply, which comes after the imports."""


class ForkServerError(Exception):
    """The worker cannot be forked."""


class UsedCommandError(ForkServerError):
    """The command has started a worker before."""


def main(encoded_spec: str, arguments: list[str]) -> None:
    """Run a worker with these arguments, forked from the server if possible."""
    try:
        spec = json.loads(zlib.decompress(base64.urlsafe_b64decode(encoded_spec)))
        connection, pid, pidfd = _fork_worker(spec, arguments)
    except UsedCommandError:
        # Ray's tasks and actors inherit the runtime environment of the worker that starts them.
        python = _find_inherited_python()
        os.execv(python, [python, *arguments])
    except (OSError, ValueError, ForkServerError) as error:
        os.environ[ERROR_VARIABLE] = str(error) or type(error).__name__
        os.execv(sys.executable, [sys.executable, *arguments])
    _exit_with(wait_for_status(connection, pid, pidfd))


def _find_inherited_python() -> str:
    """Return the interpreter of this process's own runtime environment, if it has one."""
    virtual_env = os.environ.get("VIRTUAL_ENV", "")
    python = os.path.join(virtual_env, "bin", "python")
    is_of_ray = "runtime_resources" in virtual_env.split(os.sep)
    return python if is_of_ray and os.path.exists(python) else sys.executable


def _fork_worker(spec: dict[str, Any], arguments: list[str]) -> tuple[socket.socket, int, int]:
    """Return a connection to the server, and the worker's process ID and pidfd."""
    if not hasattr(os, "pidfd_open"):
        raise ForkServerError("forking needs Linux 5.3 or later")
    server = {name: spec[name] for name in ("modules", "worker_modules", "sys_path")}
    environment = _select_server_environment(spec)
    path = _get_socket_path({"server": server, "environment": environment})
    request = {
        "arguments": arguments,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "owner": spec["owner"],
        "raylet": os.getppid(),
        "command": spec["command"],
    }
    for _ in range(_ATTEMPTS):
        connection = _connect(path, server, environment, spec["owner"])
        pid = request_fork(connection, request, (0, 1, 2), _wait_for_reply)
        if pid is not None:
            return connection, pid, os.pidfd_open(pid)
        connection.close()
    raise ForkServerError(f"the fork server ended {_ATTEMPTS} times")


def _select_server_environment(spec: dict[str, Any]) -> dict[str, str]:
    """Return the environment of the server: the worker's, with the driver's variables."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(_VOLATILE_PREFIX) and name not in VOLATILE_NAMES
    }
    environment.update(spec["environment"])
    return environment


def _get_socket_path(identity: dict[str, Any]) -> str:
    """Return the socket of the server for an environment; its directory is this user's alone."""
    status = os.stat(SERVER_FILE)
    versions = [sys.executable, sys.version, SERVER_FILE, status.st_mtime_ns, status.st_size]
    text = json.dumps([identity, versions], sort_keys=True)
    digest = hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
    name = os.path.join(f"drawbar-{os.geteuid()}", f"fork-{digest}.sock")
    path = os.path.join(os.environ.get("TMPDIR") or "/tmp", name)
    if len(os.fsencode(path)) > _MAX_SOCKET_PATH:
        path = os.path.join("/tmp", name)
    directory = os.path.dirname(path)
    try:
        os.mkdir(directory, 0o700)
    except FileExistsError:
        # lstat, because another user may have put a link there.
        owner = os.lstat(directory)
        if owner.st_uid != os.geteuid() or owner.st_mode & 0o170077 != 0o040000:
            raise ForkServerError(f"{directory} is not private to this user") from None
    return path


def _connect(
    path: str, server: dict[str, Any], environment: dict[str, str], owner: Sequence[object]
) -> socket.socket:
    """Connect to the server, and start it first if there is none."""
    connection = socket.socket(socket.AF_UNIX)
    directory = os.path.dirname(path)
    lock = os.open(directory, os.O_RDONLY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _try_connect(connection, path):
            _leave_other_servers(directory, owner)
            _start_server(path, server, environment)
            connection.connect(path)
    finally:
        os.close(lock)
    return connection


def _try_connect(connection: socket.socket, path: str) -> bool:
    try:
        connection.connect(path)
    except (FileNotFoundError, ConnectionRefusedError):
        return False
    return True


def _leave_other_servers(directory: str, owner: Sequence[object]) -> None:
    """Let servers end soon that only this driver has used, and remove the files of killed ones.

    Otherwise a driver whose runs have different variables would have a server for each of them.
    """
    for name in os.listdir(directory):
        path = os.path.join(directory, name)
        if name.startswith("fork-") and name.endswith(".sock"):
            with socket.socket(socket.AF_UNIX) as connection:
                if _try_connect(connection, path):
                    notice = json.dumps({"left_by": owner}).encode()
                    try:  # noqa: SIM105  # the import of contextlib would take longer
                        connection.sendall(b"\n" + notice + b"\n")
                    except OSError:
                        pass  # it has ended meanwhile
                    continue
            for file in (path, f"{path}.log"):
                if os.path.exists(file):
                    os.unlink(file)


def _start_server(path: str, server: dict[str, Any], environment: dict[str, str]) -> None:
    # The socket is created here, so that a client can connect before the server has started.
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(1024)
    if os.fork() == 0:
        try:
            os.setsid()
            if os.fork():
                os._exit(0)  # the server must not be a child of a worker's process
            log = os.open(f"{path}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            os.dup2(listener.fileno(), 3)
            os.set_inheritable(3, True)
            os.closerange(4, 256)
            command = [sys.executable, SERVER_FILE, path, json.dumps(server)]
            os.execve(sys.executable, command, environment)
        finally:
            os._exit(1)
    os.wait()
    listener.close()


def request_fork(
    connection: socket.socket,
    request: dict[str, Any],
    descriptors: Sequence[int],
    wait_for_reply: Callable[[socket.socket], None],
) -> int | None:
    """Request a worker from the server.

    Args:
        connection: Connection to the server. The server kills the worker if it is closed before the
            worker has ended, and keeps the status and the ID of the worker until it is closed.
        request: The request, as in `server.py`.
        descriptors: Standard streams of the worker, and others that it receives.
        wait_for_reply: Waits until the connection has data, and raises `ForkServerError` if it has
            none after `REPLY_TIMEOUT_S`.

    Returns:
        Process ID of the worker, None if the server has ended or an imported file has changed.

    Raises:
        ForkServerError: The server cannot fork workers.
        UsedCommandError: The server has forked a worker for this command before.
        OSError: There is no connection to the server.
    """
    try:
        socket.send_fds(connection, [b"\n"], descriptors)
        connection.sendall(json.dumps(request).encode() + b"\n")
        wait_for_reply(connection)
        reply = _receive(connection)
    except (BrokenPipeError, ConnectionResetError):
        return None
    if error := reply.get("error"):
        raise ForkServerError(error)
    if reply.get("is_used"):
        raise UsedCommandError
    return reply.get("pid")


def _wait_for_reply(connection: socket.socket) -> None:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    if not poller.poll(REPLY_TIMEOUT_S * 1000):
        raise ForkServerError(f"the fork server has not replied for {REPLY_TIMEOUT_S} s")


def _receive(connection: socket.socket) -> dict[str, Any]:
    # Without a buffer, which would also take the next message.
    with connection.makefile("rb", buffering=0) as stream:
        line = stream.readline()
    reply: dict[str, Any] = json.loads(line) if line.endswith(b"\n") else {}
    return reply


def wait_for_status(connection: socket.socket, pid: int, pidfd: int) -> int:
    """Return the worker's wait status; -1 if the server has ended and it is unknown."""
    try:
        status = _receive(connection).get("status")
    except OSError:
        status = None
    if status is not None:
        return int(status)
    poller = select.poll()
    poller.register(pidfd, select.POLLIN)
    poller.poll()
    return -1


def _exit_with(status: int) -> None:
    if status >= 0 and os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.WEXITSTATUS(status) if status >= 0 else 1)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
