"""Fixtures for tests of complete processes: separate drivers, and pipes to receive from them."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import select
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import IO, Any

import cloudpickle
import pytest
import ray

PATIENCE_S = 280
MAIN = "import sys, cloudpickle; cloudpickle.load(open(sys.argv[1], 'rb'))()"

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # other processes cannot import it


class Drivers:
    """Run functions as main programs of new processes, which connect to the tests' Ray if it runs.

    with drivers(main) as driver:
        driver.send_signal(signal.SIGINT)
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0

    @contextlib.contextmanager
    def __call__(
        self, main: Callable[[], Any], **environ: str | None
    ) -> Iterator[subprocess.Popen[str]]:
        """Start a driver and kill it at the end of the block; `environ` sets and unsets variables.

        If the block fails, the stderr of the process is printed.
        """
        self._count += 1
        program = self._folder / f"main_{self._count}.pkl"
        program.write_bytes(_pickled_by_value(main))
        if ray.is_initialized():
            environ = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address, **environ}
        settings = {**os.environ, **environ}
        with subprocess.Popen(
            [sys.executable, "-c", MAIN, str(program)],
            env={name: value for name, value in settings.items() if value is not None},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a separate process group, which a test may interrupt
        ) as process:
            try:
                yield process
            except BaseException:
                print(f"process {process.pid}: {process.poll()}, {_unread(process.stderr)}")
                raise
            finally:
                process.kill()

    def run(self, main: Callable[[], Any], **environ: str | None) -> tuple[str, str]:
        """Run a driver that must succeed; return its stdout and stderr."""
        with self(main, **environ) as process:
            out, err = process.communicate()
        assert process.returncode == 0, err
        return out, err


def _pickled_by_value(main: Callable[[], Any]) -> bytes:
    """Pickle a function by value, since other processes cannot import its module."""
    module = sys.modules[main.__module__]
    if module.__name__ in cloudpickle.list_registry_pickle_by_value():
        return bytes(cloudpickle.dumps(main))
    cloudpickle.register_pickle_by_value(module)
    try:
        return bytes(cloudpickle.dumps(main))
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _unread(stream: IO[str] | None) -> str:
    """Return unread pipe content without waiting, since other processes may hold it open."""
    if stream is None or stream.closed:
        return ""
    os.set_blocking(stream.fileno(), False)
    with contextlib.suppress(BlockingIOError):
        return os.read(stream.fileno(), 1 << 16).decode(errors="replace")
    return ""


@pytest.fixture(scope="session")
def drivers(tmp_path_factory: pytest.TempPathFactory) -> Drivers:
    return Drivers(tmp_path_factory.mktemp("drivers"))


class Pipe:
    """Named pipe: any process sends lines, and the test waits for them."""

    def __init__(self, path: Path) -> None:
        os.mkfifo(path)
        self._path = path
        self._file = open(path, "r+b", buffering=0)  # noqa: SIM115  # closed by the fixture

    def __reduce__(self) -> tuple[Any, ...]:
        return _PipeSender, (self._path,)

    def send(self, *words: object) -> None:
        """Send a line from another process."""
        _PipeSender(self._path).send(*words)

    def receive(self, process: subprocess.Popen[Any] | None = None) -> list[str]:
        """Wait for the next line, and return its words.

        Args:
            process: Process that sends the line. Its end fails the test, and there is no other
                limit.
        """
        if process is None:
            assert select.select([self._file], [], [], PATIENCE_S)[0], "no process has written"
            return self._file.readline().decode().split()
        end = os.pidfd_open(process.pid)
        try:
            sources: list[Any] = [self._file, end]
            ready = select.select(sources, [], [])[0]
        finally:
            os.close(end)
        assert self._file in ready, f"process {process.pid} ended with {process.wait()}"
        return self._file.readline().decode().split()

    def close(self) -> None:
        self._file.close()


class _PipeSender:
    """Sending end of a `Pipe` in another process."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def send(self, *words: object) -> None:
        self._path.write_text(" ".join(map(str, words)) + "\n")


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[Pipe]:
    pipe = Pipe(tmp_path / "pipe")
    yield pipe
    pipe.close()


def _wait_until_gone(pids: Iterable[int], seconds: float = PATIENCE_S) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(pid)
            assert select.select([pidfd], [], [], seconds)[0], f"process {pid} lives"
            os.close(pidfd)


@pytest.fixture
def wait_until_gone() -> Callable[..., None]:
    """Return a function that waits until each of the processes has ended."""
    return _wait_until_gone


def lowest_free_file_descriptor() -> int:
    lowest = os.dup(0)
    os.close(lowest)
    return lowest


@contextlib.contextmanager
def no_free_file_descriptor(lowest: int) -> Iterator[Callable[[], None]]:
    """Prevent this process from opening files, if all descriptors below `lowest` are in use.

    Yields a function that waits until an `accept()` has failed. A waiting `accept()` has already
    reserved a descriptor.
    """
    failed = threading.Event()

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "a connection cannot be accepted" in record.getMessage():
                failed.set()

    def wait_until_accept_failed() -> None:
        assert failed.wait(PATIENCE_S), "no accept() has failed, or its thread has ended"

    logger, handler = logging.getLogger("drawbar.train"), Handler()
    logger.addHandler(handler)
    level, limits = logger.level, resource.getrlimit(resource.RLIMIT_NOFILE)
    logger.setLevel(logging.DEBUG)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, limits[1]))
    try:
        yield wait_until_accept_failed
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        logger.setLevel(level)
        logger.removeHandler(handler)
