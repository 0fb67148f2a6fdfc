"""Unix socket through which other processes on this host control a run.

The socket is in a directory that only this user may access. It is not in the run directory, which
may be an object store, or have a path that is too long for a socket. A request is one line, a reply
is one line of JSON. The run does not depend on the socket: if it cannot be created, other processes
cannot reach the run.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import select
import socket
import threading
import uuid
import weakref
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from drawbar._handle.run_view import RunView
from drawbar._process.errors import CheckpointError
from drawbar._process.threads import wait_to_accept_again
from drawbar._runs.sockets import is_dead_socket
from drawbar._storage.download_cache import get_user_temp_directory
from drawbar._storage.run_directory import RunDirectory
from drawbar.train._driver.controller_thread import DIAGNOSIS_TIMEOUT_S

REPLY_TIMEOUT_S = 10.0
"""Time after which a process that has not replied counts as unresponsive."""

WAIT_FOR_END = "follow"
_REQUEST_TIMEOUT_S = 5.0  # from the connection to the request
_CLOSE_TIMEOUT_S = 1.0  # for the listening thread

_logger = logging.getLogger("drawbar.train")


class ControlReply(msgspec.Struct, frozen=True):
    """Reply of a run. `error` is empty if the request succeeded."""

    text: str = ""
    error: str = ""


# Once for all threads: msgspec can crash if two threads use a type for the first time.
_reply_decoder = msgspec.json.Decoder(ControlReply)


def _make_name_prefix(run: Path) -> str:
    """Return the prefix of the names of a run's sockets."""
    # From the real path, so that the run is found through symbolic links too.
    digest = hashlib.sha256(os.fsencode(run.resolve())).hexdigest()[:16]
    return f"run_{digest}"


class ControlSocket:
    """Control socket of a run, open until `close`. The creator must hold the lock of the run.

    Args:
        path: Local path of the run.
        run: The run.
    """

    def __init__(self, path: Path, run: RunView) -> None:
        self._waiting_clients: list[socket.socket] = []
        self._handlers: Mapping[str, Callable[[], str | None]] = {
            "stop": lambda: run.stop(save=True),
            "stop now": lambda: run.stop(save=False),
            "stop if unused": lambda: run.stop(save=None),
            "kill": run.kill,
            "diagnose": run.diagnose,
        }
        self._socket: socket.socket | None = None
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="drawbar-control", daemon=True)
        self._path = path
        try:
            directory = get_user_temp_directory()
            for path_of_other in directory.glob("run_*.sock"):
                if is_dead_socket(path_of_other):  # of a process that was killed
                    path_of_other.unlink(missing_ok=True)
            # A new name each time: other processes may be deleting the sockets of the previous one.
            unpublished_path = directory / f"{_make_name_prefix(path)}_{uuid.uuid4().hex[:7]}"
            self._path = unpublished_path.with_suffix(".sock")
            self._socket = socket.socket(socket.AF_UNIX)
            self._socket.bind(str(unpublished_path))
            self._socket.listen()
            unpublished_path.rename(self._path)  # only when it is listening
        except Exception as error:
            _logger.debug("other processes cannot reach the run: %s", error)
            self.close()
        else:
            self._thread.start()

    def close(self) -> None:
        """Stop handling requests. The connections of waiting clients end, which reports the end."""
        self._closed.set()
        if self._socket is None:
            return
        with contextlib.suppress(OSError):
            self._path.unlink(missing_ok=True)
        for connection in (self._socket, *self._waiting_clients):
            with contextlib.suppress(OSError):  # the client may have disconnected
                connection.shutdown(socket.SHUT_RDWR)  # also in forked children that inherited it
            connection.close()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_TIMEOUT_S)

    def _listen(self) -> None:
        assert self._socket is not None
        while not self._closed.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError as error:
                wait_to_accept_again(error, self._closed)
                continue
            # One thread per connection: a diagnosis takes seconds, and must not delay a stop.
            threading.Thread(
                target=self._handle_connection,
                args=(connection,),
                name="drawbar-control-request",
                daemon=True,
            ).start()

    def _handle_connection(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):  # the client may have disconnected
            # A client that sends no request must not block the thread until the run ends.
            connection.settimeout(_REQUEST_TIMEOUT_S)
            with connection.makefile("rb") as lines:
                request = lines.readline().decode(errors="replace").strip()
            if request == WAIT_FOR_END:
                self._waiting_clients.append(connection)
                return
            connection.sendall(msgspec.json.encode(self._handle_request(request)) + b"\n")
        connection.close()

    def _handle_request(self, request: str) -> ControlReply:
        handler = self._handlers.get(request)
        if handler is None:
            return ControlReply(
                error="the run was started by another Drawbar version, which does not support "
                f"{request!r}"
            )
        try:
            return ControlReply(handler() or "")
        except Exception as error:
            return ControlReply(error=f"{type(error).__name__}: {error}")


def send_request(run: Path, request: str, timeout: float) -> ControlReply | None:
    """Send a request to the run at a local path and return its reply.

    Args:
        run: Local path of the run.
        request: The request.
        timeout: Maximum number of seconds to wait for the reply.

    Returns:
        The reply, or None if no process of this user on this host runs it.

    Raises:
        TimeoutError: The run has not replied in time.
    """
    connection = connect(run, request)
    if connection is None:
        return None
    connection.settimeout(timeout)
    try:
        with connection, connection.makefile("rb") as lines:
            return _reply_decoder.decode(lines.readline())
    except TimeoutError:
        raise TimeoutError(
            f"the process that hosts the run in {run} has not replied for {timeout:g} s: it is "
            "suspended or busy"
        ) from None
    except (OSError, msgspec.DecodeError):  # the run has ended in the meantime
        return None


def connect(run: Path, request: str) -> socket.socket | None:
    """Send a request to the run at a local path and return the connection.

    With the request `WAIT_FOR_END`, the connection stays open until the run ends.

    Returns:
        The connection, or None if no process of this user on this host runs it.
    """
    with contextlib.suppress(OSError, CheckpointError):
        for path in get_user_temp_directory().glob(f"{_make_name_prefix(run)}_*.sock"):
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(str(path))
                connection.sendall(request.encode() + b"\n")
            except OSError:  # the socket of a process that was killed
                connection.close()
            else:
                return connection
    return None


class SameHostRun(RunView):
    """View of a run that another process of this user on this host controls.

    That process accepts requests through a socket. Create instances with `find`.
    """

    is_detached = True  # the run continues when its clients stop waiting

    def __init__(self, directory: RunDirectory, connection: socket.socket) -> None:
        self.directory = directory
        self._connection = connection
        # Close the connection with the handle, so that the run does not keep a dead client.
        weakref.finalize(self, connection.close)

    @classmethod
    def find(cls, directory: RunDirectory) -> SameHostRun | None:
        """Return the run in a directory, or None if no process of this user here runs it."""
        connection = connect(directory.local_path, WAIT_FOR_END)
        return None if connection is None else cls(directory, connection)

    def join(self, timeout: float | None = None) -> bool:
        """Wait until the run has ended and return whether it has."""
        ended, _, _ = select.select([self._connection], [], [], timeout)
        return bool(ended)

    def stop(self, *, save: bool | None) -> None:
        """Stop the run: gracefully after its next commit, or immediately."""
        self._request({True: "stop", False: "stop now", None: "stop if unused"}[save])

    def kill(self) -> None:
        """Kill every process of the run immediately."""
        self._request("kill")

    def diagnose(self) -> str:
        """Return a description of what each rank is blocked in, or "" if the run has ended."""
        return self._request("diagnose", extra_seconds=DIAGNOSIS_TIMEOUT_S)

    def _request(self, request: str, *, extra_seconds: float = 0.0) -> str:
        timeout = REPLY_TIMEOUT_S + extra_seconds
        reply = send_request(self.directory.local_path, request, timeout)
        if reply is not None and reply.error:
            name, uri = self.directory.name, self.directory.uri
            raise RuntimeError(f"run {name!r} in {uri}: {reply.error}")
        return "" if reply is None else reply.text

    def read_log(self, rank: int) -> bytes | None:
        """Return the output that a rank has written so far, or None if there is none."""
        return self.directory.read_log(rank)
