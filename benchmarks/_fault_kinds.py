"""Thirty faults of ten kinds: the failure of a training function, and the expected reaction.

Each fault is a function that every rank calls before each step. Some of them are real failures of
the machine: the system refuses memory, a connection, or a write, or kills the process.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

FAULTY_STEP = 4
CHECKPOINT_STEP = 2
"""The only step with a checkpoint, before the faulty one."""

NUM_STEPS = 7
FREE_BYTES = 200_000_000
MISSING_BYTES = 4_000_000_000


@dataclass(frozen=True)
class Site:
    """Step, rank, and attempt of a call of a fault.

    Attributes:
        step: Number of the next step; -1 at the start of the function.
        rank: Rank of the caller.
        attempt: Number of the attempt.
        resume_step: Step from which the attempt has resumed; 0 for a start from scratch.
        node: ID of the rank's node.
        folder: Folder that all attempts share.
    """

    step: int
    rank: int
    attempt: int
    resume_step: int
    node: str
    folder: Path

    def matches(self, *, step: int = FAULTY_STEP, rank: int | None = 1, attempts: int = 1) -> bool:
        """Return whether this is a step of the first attempts, on a rank or on all."""
        return self.step == step and rank in (None, self.rank) and self.attempt < attempts

    def is_bad_node(self) -> bool:
        """Return whether the rank is on the node of rank 1 in the first attempt."""
        file = self.folder / "bad_node"
        if self.rank == 1 and not file.exists():
            file.write_text(self.node)
        return file.exists() and file.read_text() == self.node


Action = Literal["", "lose_node", "drain_node"]


@dataclass(frozen=True)
class Fault:
    """A fault and the expected reaction.

    Attributes:
        kind: One of the ten kinds.
        title: What fails.
        inject: Called by each rank before each step, and at the start with step -1.
        verdicts: Expected causes of the failed attempts, in order.
        outcome: Expected end of the run.
        num_workers: Number of ranks. Three of them use all nodes.
        hang_timeout: As in `FailureConfig`.
        action: Action of the driver when all ranks are at the faulty step of the first attempt.
        uses_torch: Whether the batches come from a DataLoader.
    """

    kind: str
    title: str
    inject: Callable[[Site], None]
    verdicts: list[str]
    outcome: Literal["finished", "failed"] = "finished"
    num_workers: int = 2
    hang_timeout: float | None = None
    action: Action = ""
    uses_torch: bool = False

    @property
    def is_deterministic(self) -> bool:
        """True if the run must stop because of the fault."""
        return self.verdicts[-1:] == ["deterministic"]


# -- bad batches


def raise_at_step(site: Site) -> None:
    """Raise with a message that differs each time."""
    if site.step == FAULTY_STEP and site.rank == 1:
        raise ValueError(f"row {id(site)} contains NaN")


def raise_on_all_ranks(site: Site) -> None:
    """Raise on all ranks at once."""
    if site.step == FAULTY_STEP:
        print(1 / (site.step - FAULTY_STEP))


def do_nothing(site: Site) -> None:
    """Do nothing: the dataset or the driver fails."""


# -- bad nodes


def crash_on_node(site: Site) -> None:
    """Crash at another step in each attempt, on one node."""
    if site.is_bad_node() and site.step == FAULTY_STEP + site.attempt:
        ctypes.string_at(0)


def raise_ecc_error_on_node(site: Site) -> None:
    """Raise what PyTorch raises for a broken GPU, on one node."""
    if site.is_bad_node() and site.step == FAULTY_STEP:
        raise RuntimeError("CUDA error: uncorrectable ECC error encountered")


def miss_library_on_node(site: Site) -> None:
    """Fail to load a library that one node does not have."""
    if site.is_bad_node() and site.step == -1:
        raise ImportError("libmodel.so.1: cannot open shared object file")


# -- lack of memory


def allocate(nbytes: int) -> None:
    """Allocate more memory than the process may use."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (used + FREE_BYTES, limits[1]))
    try:
        bytearray(nbytes)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def allocate_once(site: Site) -> None:
    """Use too much memory in the first attempt."""
    if site.matches():
        allocate(MISSING_BYTES)


def allocate_always(site: Site) -> None:
    """Use too much memory at the same step of each attempt."""
    if site.step == FAULTY_STEP and site.rank == 1:
        allocate(MISSING_BYTES)


def allocate_later(site: Site) -> None:
    """Use too much memory at other steps, on other ranks."""
    if site.rank == site.attempt and site.step == FAULTY_STEP + site.attempt:
        allocate(MISSING_BYTES)


# -- network


def connect_to_closed_port(site: Site) -> None:
    """Connect to a port at which no process listens."""
    if site.matches(attempts=2):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            address = unused.getsockname()
        socket.create_connection(address, timeout=10)


def wait_for_reply(site: Site) -> None:
    """Wait for the reply of a server that never replies, at the start."""
    if site.matches(step=-1, attempts=2):
        server = socket.create_server(("127.0.0.1", 0))
        with server, socket.create_connection(server.getsockname(), timeout=0.2) as connection:
            connection.recv(1)


def wrap_connection_error(site: Site) -> None:
    """Raise another exception because of a reset connection."""
    if site.matches(attempts=2):
        try:
            raise ConnectionResetError(104, "Connection reset by peer")
        except ConnectionResetError as error:
            raise RuntimeError("cannot read the shard") from error


# -- preemption


def receive_sigterm(site: Site) -> None:
    """End by the signal with which schedulers end processes."""
    if site.matches():
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(60)


# -- full disks


def write(path: str = "/dev/full") -> None:
    """Write to a device that is always full."""
    with open(path, "wb") as file:
        file.write(b"sample")


def fill_disk_of_node(site: Site) -> None:
    """Write to the full disk of one node."""
    if site.is_bad_node() and site.step == FAULTY_STEP:
        write()


def fill_all_disks(site: Site) -> None:
    """Write to a full disk on each node."""
    if site.rank == 1 and site.step == FAULTY_STEP:
        write()


def fill_disk_in_child(site: Site) -> None:
    """Let a child process fail because of the full disk of one node."""
    if site.is_bad_node() and site.step == FAULTY_STEP:
        code = "with open('/dev/full', 'w') as file: file.write('x')"
        ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        raise RuntimeError(f"the converter failed: {ended.stderr.splitlines()[-1]}")


# -- imports


def miss_name_once(site: Site) -> None:
    """Fail to import a name in the first attempt, on one rank."""
    if site.matches(step=-1):
        raise ImportError("cannot import name 'Tokenizer' from partially initialized module")


def miss_module_once(site: Site) -> None:
    """Fail to find a module in the first attempt, on all ranks."""
    if site.matches(step=-1, rank=None):
        raise ModuleNotFoundError("No module named 'model'")


def read_stale_file_once(site: Site) -> None:
    """Fail to read a module from a network filesystem in the first attempt."""
    if site.matches(step=-1):
        raise OSError(116, "Stale file handle", "/shared/model.py")


# -- crashes in C code


def read_null(site: Site) -> None:
    """Read from address 0."""
    if site.step == FAULTY_STEP and site.rank == 1:
        ctypes.string_at(0)


def abort(site: Site) -> None:
    """Abort, as C++ does after an exception that no code catches."""
    if site.step == FAULTY_STEP and site.rank == 1:
        os.abort()


def divide_in_c(site: Site) -> None:
    """Raise the signal of a division by zero in C."""
    if site.step == FAULTY_STEP and site.rank == 1:
        getattr(ctypes.CDLL(None), "raise")(int(signal.SIGFPE))


# -- bugs after a resume


def _kill_first_attempt(site: Site) -> None:
    if site.matches(rank=0):
        os.kill(os.getpid(), signal.SIGKILL)


def fail_to_load(site: Site) -> None:
    """Be killed once, and then fail to load the checkpoint."""
    _kill_first_attempt(site)
    if site.resume_step and site.step == -1:
        print({"model": 0}["optimizer"])


def fail_after_load(site: Site) -> None:
    """Be killed once, and then fail at the first step after the checkpoint, on one rank."""
    _kill_first_attempt(site)
    if site.step == site.resume_step > 0 and site.rank == 1:
        raise TypeError("unsupported operand type(s) for +: 'int' and 'str'")


def exit_after_load(site: Site) -> None:
    """Be killed once, and then exit because of the checkpoint."""
    _kill_first_attempt(site)
    if site.resume_step and site.step == -1:
        sys.exit("the checkpoint has another number of layers")


# -- hangs


def hang_once(site: Site) -> None:
    """Wait forever in the first attempt."""
    if site.matches():
        time.sleep(3600)


def hang_always(site: Site) -> None:
    """Wait forever at the same step of each attempt."""
    if site.step == FAULTY_STEP and site.rank == 1:
        time.sleep(3600)


def stop_once(site: Site) -> None:
    """Be stopped by a signal in the first attempt."""
    if site.matches():
        os.kill(os.getpid(), signal.SIGSTOP)


FAILED: Literal["failed"] = "failed"
HANG_SECONDS = 10.0

FAULTS = [
    Fault(
        "bad batch", "an exception in a step", raise_at_step, ["exception", "deterministic"], FAILED
    ),
    Fault(
        "bad batch",
        "an exception in a dataset",
        do_nothing,
        ["exception", "deterministic"],
        FAILED,
        uses_torch=True,
    ),
    Fault(
        "bad batch",
        "an exception on all ranks",
        raise_on_all_ranks,
        ["exception", "deterministic"],
        FAILED,
    ),
    Fault("bad node", "SIGSEGV at other steps", crash_on_node, ["crash", "bad_node"]),
    Fault("bad node", "an ECC error", raise_ecc_error_on_node, ["hardware", "bad_node"]),
    Fault("bad node", "a missing library", miss_library_on_node, ["exception", "bad_node"]),
    Fault("out of memory", "once", allocate_once, ["out_of_memory"]),
    Fault(
        "out of memory",
        "at the same step",
        allocate_always,
        ["out_of_memory", "deterministic"],
        FAILED,
    ),
    Fault("out of memory", "at other steps", allocate_later, ["out_of_memory", "out_of_memory"]),
    Fault("network", "refused connection, twice", connect_to_closed_port, ["network", "network"]),
    Fault("network", "no reply, twice", wait_for_reply, ["network", "network"]),
    Fault(
        "network",
        "as the cause of another error, twice",
        wrap_connection_error,
        ["network", "network"],
    ),
    Fault("preemption", "a lost node", do_nothing, ["preemption"], action="lose_node"),
    Fault("preemption", "a drained node", do_nothing, ["preemption"], action="drain_node"),
    Fault("preemption", "SIGTERM", receive_sigterm, ["killed"]),
    Fault("full disk", "of one node", fill_disk_of_node, ["full_disk"]),
    Fault(
        "full disk", "without another node", fill_all_disks, ["full_disk"], FAILED, num_workers=3
    ),
    Fault("full disk", "in a child process", fill_disk_in_child, ["full_disk"]),
    Fault("flaky import", "of a name, one rank", miss_name_once, ["exception"]),
    Fault("flaky import", "of a module, all ranks", miss_module_once, ["exception"]),
    Fault("flaky import", "stale file handle", read_stale_file_once, ["hardware"]),
    Fault("crash in C code", "SIGSEGV", read_null, ["crash", "deterministic"], FAILED),
    Fault("crash in C code", "SIGABRT", abort, ["crash", "deterministic"], FAILED),
    Fault("crash in C code", "SIGFPE", divide_in_c, ["crash", "deterministic"], FAILED),
    Fault(
        "bug after resume",
        "in the loading of the checkpoint",
        fail_to_load,
        ["killed", "exception", "deterministic"],
        FAILED,
    ),
    Fault(
        "bug after resume",
        "in the first step",
        fail_after_load,
        ["killed", "exception", "deterministic"],
        FAILED,
    ),
    Fault(
        "bug after resume",
        "sys.exit()",
        exit_after_load,
        ["killed", "exception", "deterministic"],
        FAILED,
    ),
    Fault("hang", "once", hang_once, ["hang"], hang_timeout=HANG_SECONDS),
    Fault(
        "hang",
        "at the same step",
        hang_always,
        ["hang", "deterministic"],
        FAILED,
        hang_timeout=HANG_SECONDS,
    ),
    Fault("hang", "a stopped process", stop_once, ["hang"], hang_timeout=HANG_SECONDS),
]
