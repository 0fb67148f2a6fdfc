"""A run that a command has started: the Ray that it is on, and its end, which is the command's."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from drawbar.cli._output import CommandError

if TYPE_CHECKING:
    from drawbar.train import RunHandle, TrainingFailedError, WorkerFailure

INTERRUPTED, TERMINATED = 130, 143  # what a shell says of SIGINT and SIGTERM


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Have what cannot be done said in one line."""
    from drawbar.train import InsufficientResourcesError, JournalLockedError

    try:
        yield
    except (
        ValueError,
        TypeError,
        ImportError,
        OSError,
        JournalLockedError,
        InsufficientResourcesError,
    ) as error:
        raise CommandError(str(error)) from error


def connect(address: str | None, *, standalone: bool, cpus: int, stays: bool) -> None:
    """Join a Ray that runs, or start one that ends with this process.

    Args:
        address: Of the one to join; if not given, RAY_ADDRESS, or one that runs here.
        standalone: Start one in any case.
        cpus: It has so many at least.
        stays: It must not end with this process.

    Raises:
        CommandError: These do not go together.
        ConnectionError: There is none at the address.
    """
    import ray

    if address and standalone:
        raise CommandError(f"--standalone is a Ray of its own, found --address {address} too")
    if ray.is_initialized():
        return  # a program of the user's has called this
    # What Ray says of its own would stand between rank 0's lines.
    settings: dict[str, Any] = {"logging_level": logging.WARNING, "log_to_driver": False}
    if not standalone and (address or "RAY_ADDRESS" in os.environ):
        ray.init(address=address, **settings)
        return
    if not standalone:
        with contextlib.suppress(ConnectionError):
            ray.init(address="auto", **settings)
            return
    if stays:
        raise CommandError(
            "--detach needs a Ray that stays: start one by ray start --head, or give --address"
        )
    # Ray has its workers stand back (nice 15), which a user who is not root cannot take back.
    os.environ.setdefault("RAY_worker_niceness", "0")
    cores = len(os.sched_getaffinity(0))
    ray.init(address="local", num_cpus=max(cpus, cores), include_dashboard=False, **settings)


def most_of_a_node(resource: str) -> int:
    """Give how much of a resource the node has that has most."""
    import ray

    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has none here
    return int(max((node["Resources"].get(resource, 0) for node in nodes), default=0))


def gpus_of_all() -> int:
    """Give the number of GPUs of all nodes."""
    import ray

    return int(ray.cluster_resources().get("GPU", 0))  # type: ignore[no-untyped-call]  # as above


def exit_code_when_over(handle: RunHandle) -> int:
    """Wait for the end of a run, say why it has failed if it has, and give the exit code."""
    from drawbar import train
    from drawbar.launch import exit_code_of

    interrupted = INTERRUPTED

    def interrupt(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = TERMINATED
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    code = 0
    try:
        handle.wait()
    except train.UserAbort:
        code = interrupted
        print(
            f"drawbar: stopped by {'Ctrl-C' if code == INTERRUPTED else 'SIGTERM'}; --name "
            f"{handle.name} goes on from the newest checkpoint in {handle.path}, if it has one",
            file=sys.stderr,
        )
    except train.TrainingFailedError as error:
        print(_told(error), file=sys.stderr)
        code = exit_code_of(error)
    _leave_stdout()
    return code


def _told(error: TrainingFailedError) -> str:
    """Tell why a run has failed, the traceback that is its cause last."""
    from drawbar.train import WorkerGroupError

    if not isinstance(error, WorkerGroupError) or not error.failures:
        return str(error)
    first, *others = error.failures
    return "\n".join([*_folded(others), f"run directory: {error.path}", "", first.describe()])


def _folded(failures: Sequence[WorkerFailure]) -> list[str]:
    if not failures:
        return []
    return ["failed after it:", *(f"  {each.headline()}" for each in failures)]


def _leave_stdout() -> None:
    """Let Python end in silence if who has read standard output is gone."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
