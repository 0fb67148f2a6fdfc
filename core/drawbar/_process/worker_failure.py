"""Failure of one worker as plain data.

A worker describes its failure by a `WorkerFailure`, which any process can read. The pickled
exception is an optional addition; `WorkerError` replaces it if it cannot be unpickled.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Literal

import msgspec

from drawbar._base.wording import format_count

# Messages of gloo, NCCL, PyTorch's store, gRPC (JAX, TensorFlow), and sockets.
CONNECTION_LOST = re.compile(
    r"closed by (the )?(remote )?peer|reset by peer|broken pipe|socket closed|remote process exited"
    r"|connection (was likely closed|refused)|\bUNAVAILABLE\b",
    re.IGNORECASE,
)

FailureKind = Literal[
    "exception", "exit", "died", "evicted", "configuration", "divergence", "hang", "startup",
    "storage", "rollback",
]  # fmt: skip
"""Kinds of failure. "exit" is a program that ended itself with a non-zero exit code, by
`sys.exit()` or KeyboardInterrupt. "evicted" is a worker whose node the health checks evict."""


class WorkerFailure(msgspec.Struct, frozen=True, kw_only=True):
    """Failure of one worker as plain data. Reading it does not import the exception's class.

    Attributes:
        rank: Rank of the worker, -1 if no single rank is responsible.
        kind: Kind of failure.
        type_name: Name of the exception's class.
        message: Message of the exception.
        traceback: Traceback of the exception, "" if there is none.
        location: Innermost line of user code as `file:line in function`, "" if there is none.
        hostname: Host of the worker.
        node_id: Ray's id of the worker's node.
        pid: Process id of the worker.
        time: Time of the failure on the worker's node, in seconds since the epoch. The earliest
            failure of an attempt is its root cause.
        num_reports: Number of the rank's reports in the attempt.
        num_batches: Batches that the rank has received from its data loaders since its last
            report, or steps that it has counted with `train.step()`; None if unknown.
        data_position: Position of its data loaders, for example "epoch 2, after 96 samples".
        builtin_type: Nearest built-in class of the exception, for example "OSError".
        log_path: File with the output of the rank.
        pickled_exception: The exception, if it could be pickled.

    Example:
        ```python
        try:
            trainer.fit()
        except WorkerGroupError as error:
            print(error.failures[0].headline())
        ```
    """

    rank: int
    kind: FailureKind
    type_name: str
    message: str
    traceback: str = ""
    location: str = ""
    hostname: str = ""
    node_id: str = ""
    pid: int = 0
    time: float = 0.0
    num_reports: int = 0
    num_batches: int | None = None
    data_position: str = ""
    builtin_type: str = ""
    log_path: str = ""
    pickled_exception: bytes | None = None

    def headline(self) -> str:
        """Return one line: `rank 1: ValueError: boom (train.py:12 in step)`."""
        return self._headline(truncate_middle, 1_000)

    def _headline(self, shorten: Callable[[str, int], str], max_chars: int) -> str:
        message = self.message.strip()
        first_line = f"{self.type_name}: {message}".splitlines()[0] if message else self.type_name
        prefix = f"rank {self.rank}: " if self.rank >= 0 else ""
        suffix = f" ({self.location})" if self.location else ""
        return prefix + shorten(first_line, max_chars) + suffix

    def summary(self) -> str:
        """Return a short description: headline, process, number of reports, and log file."""
        # If there is a traceback, `describe` adds the full message at its end.
        lines = [self._headline(_cut, HEADLINE_CHARS) if self.traceback else self.headline()]
        if self.pid:
            reports = format_count(self.num_reports, "report")
            lines.append(f"  pid {self.pid} on {self.hostname}, after {reports}")
        if self.log_path:
            lines.append(f"  full output: {self.log_path}")
        return "\n".join(lines)

    def describe(self) -> str:
        """Return a full description: the summary, and the traceback or the rest of the message.

        The middle of texts with more than `MAX_SHOWN_CHARS` characters is omitted. The rank's log
        contains everything.
        """
        lines = [self.summary()]
        rest = self.message.strip().splitlines()[1:]
        if rest and not self.traceback:
            lines += [f"  {line}" for line in truncate_middle("\n".join(rest)).splitlines()]
        if self.traceback:
            text = truncate_middle(self.traceback.rstrip())
            lines += ["", *(f"  {line}" for line in text.splitlines())]
        return "\n".join(lines)


HEADLINE_CHARS = 160
"""Maximum length of a message that precedes its traceback."""

MAX_SHOWN_CHARS = 20_000
"""Maximum length of a rank's error text that is shown."""


def truncate_middle(text: str, limit: int = MAX_SHOWN_CHARS) -> str:
    """Return a text of at most about `limit` characters, omitting the middle of a longer one."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]} [... {len(text) - 2 * half} characters omitted ...] {text[-half:]}"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit].rstrip()} ..."


def sort_root_cause_first(failures: Sequence[WorkerFailure]) -> list[WorkerFailure]:
    """Sort failures by time, so that the root cause comes first.

    The death of a process is detected up to some milliseconds after the connections of its peers
    broke. A broken connection is a consequence of a death and never its cause, so a death counts as
    a tenth of a second earlier.
    """
    return sorted(failures, key=lambda f: (f.time - 0.1 * (f.kind == "died"), f.rank))


def find_failed_ranks(failures: Sequence[WorkerFailure]) -> set[int]:
    """Return the ranks that failed like the root cause, not as a consequence of it."""
    roots = sort_root_cause_first(failures)[:1]
    return {
        failure.rank
        for root in roots
        for failure in failures
        if (failure.type_name, failure.location) == (root.type_name, root.location)
    }


class WorkerError(RuntimeError):
    """Replacement for a worker's exception that cannot be unpickled in this process.

    Args:
        failure: The failure as plain data.

    Example:
        ```python
        for rank, error in group_error.worker_failures.items():
            if isinstance(error, WorkerError):
                print(rank, error.failure.type_name)
        ```
    """

    def __init__(self, failure: WorkerFailure) -> None:
        super().__init__(failure)
        self.failure = failure

    def __str__(self) -> str:
        return self.failure.describe()
