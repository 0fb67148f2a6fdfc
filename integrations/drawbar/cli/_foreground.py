"""A run that a command has started: the Ray that it is on, and its end, which is the command's."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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
        CommandError: These do not go together, or Ray does not start, or is of another version.
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
        _join(address, **settings)
        return
    if not standalone:
        with contextlib.suppress(ConnectionError):
            _join("auto", **settings)
            return
    if stays:
        raise CommandError(
            "--detach needs a Ray that stays: start one by ray start --head, or give --address"
        )
    # Ray has its workers stand back (nice 15), which a user who is not root cannot take back.
    os.environ.setdefault("RAY_worker_niceness", "0")
    cores = len(os.sched_getaffinity(0))
    _join("local", num_cpus=max(cpus, cores), include_dashboard=False, **settings)


def _join(address: str | None, **settings: Any) -> None:
    import ray

    try:
        ray.init(address=address, **settings)
    except OSError:
        raise
    except Exception as error:  # Ray raises bare ones, too
        where = "start here" if address == "local" else "be joined"
        raise CommandError(f"Ray cannot {where}: {error}") from error


@dataclass(frozen=True)
class ClusterSize:
    """What a cluster has: CPUs and GPUs of the node that has most of them, and GPUs of all."""

    most_cpus: int
    most_gpus: int
    gpus: int

    @classmethod
    def now(cls) -> ClusterSize:
        """Give that of the Ray that this process has joined."""
        import ray

        nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has none
        cpus, gpus = (
            [int(node["Resources"].get(each, 0)) for node in nodes] for each in ("CPU", "GPU")
        )
        of_all = ray.cluster_resources()  # type: ignore[no-untyped-call]  # as above
        return cls(max(cpus, default=0), max(gpus, default=0), int(of_all.get("GPU", 0)))


ANY_CLUSTER = ClusterSize(most_cpus=1, most_gpus=1, gpus=1)
"""To check options on, before there is one."""


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
