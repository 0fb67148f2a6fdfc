"""`FailureHistory`: decide from the failures of a run whether a restart can help, and where.

Pure decisions: no Ray, no I/O, no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import product

import msgspec
from msgspec.structs import replace

from drawbar._base.wording import format_count
from drawbar._process.worker_failure import WorkerFailure, find_failed_ranks
from drawbar._records.events import AttemptEnded, JournaledEvent, RunStarted
from drawbar._records.fingerprint import FailureFingerprint, FailureNature
from drawbar._records.verdict import Verdict

NEAR_SECONDS = 60.0
"""Without a batch since the last report, two failures in this time after it are at one place."""

MAX_TIME_DIFFERENCE = 0.1
"""Without a batch, exceptions at two times that differ by this share are at one place, too."""

_ELIGIBLE = ("exception", "exit", "crash", "out_of_memory", "hang")
"""Natures that are deterministic if they are repeated at the same place."""

_NEEDS_BATCH = ("out_of_memory", "hang")
"""Natures that are deterministic only at the same batch."""

_POINTS_TO_NODE = ("crash", "killed", "hardware", "out_of_memory")
"""Natures that a node can cause. A network or a service is the same for all nodes."""

_REASONS: dict[FailureNature, str] = {
    "exception": "the first exception of this kind at this place",
    "exit": "the first exit of this kind at this place",
    "crash": "the first crash of this kind at this place",
    "out_of_memory": "out of memory, which may depend on other processes",
    "full_disk": "a full disk",
    "network": "a failure of the network or of a remote service",
    "hardware": "an error of a device or a filesystem",
    "killed": "a process was killed from outside",
    "preemption": "a node was lost or is being removed",
    "hang": "the first hang at this place",
}

FailedAttempt = tuple[int, list[FailureFingerprint]]
"""Number of an attempt, and its failures, the root cause first."""

_SWITCH_OFF = "FailureConfig(stop_when_deterministic=False) restarts the run anyway"


def list_failed_attempts(events: Iterable[JournaledEvent]) -> list[FailedAttempt]:
    """Return the failed attempts since the settings of the run have changed last.

    Failures of earlier starts count, too: a scheduler may start a run again and again.

    Args:
        events: Events of the journal, with the newest start.
    """
    attempts: list[FailedAttempt] = []
    settings = b""
    for event in events:
        if isinstance(event, RunStarted):
            previous, settings = settings, msgspec.json.encode(event.config)
            if settings != previous:
                attempts = []
        elif isinstance(event, AttemptEnded) and event.verdict is not None:
            attempts.append((event.attempt, event.verdict.fingerprints))
    return attempts


class FailureHistory:
    """Failures of a run with the same settings, the oldest first.

    Args:
        attempts: Number of each failed attempt and its failures, the root cause first.
        stop_when_deterministic: As in `FailureConfig`.
        exclude_nodes_after: As in `FailureConfig`.
    """

    def __init__(
        self,
        attempts: Iterable[FailedAttempt],
        stop_when_deterministic: bool,
        exclude_nodes_after: int | None,
    ) -> None:
        self._attempts = list(attempts)
        self._should_stop = stop_when_deterministic
        self._exclude_after = exclude_nodes_after

    def judge(
        self,
        attempt: int,
        failures: Sequence[FailureFingerprint],
        exclude_node: Callable[[str], bool],
    ) -> Verdict | None:
        """Add the failures of an attempt, and return what follows from them.

        Args:
            attempt: Number of the attempt.
            failures: Failures, the root cause first.
            exclude_node: Excludes a node. Returns False if the other nodes have no room.

        Returns:
            The verdict; None without failures.
        """
        verdict = self._judge(attempt, failures, exclude_node) if failures else None
        return verdict and replace(verdict, fingerprints=list(failures))

    def _judge(
        self,
        attempt: int,
        failures: Sequence[FailureFingerprint],
        exclude_node: Callable[[str], bool],
    ) -> Verdict:
        root = failures[0]
        repeated = self._find_repetition(failures)
        self._attempts.append((attempt, list(failures)))
        if repeated is not None and not _is_bound_to_node(repeated[1], repeated[2]):
            return self._make_deterministic(attempt, *repeated)
        if root.nature == "full_disk":
            return self._judge_full_disk(root, exclude_node)
        bad_node = self._find_bad_node(is_repeated=repeated is not None)
        has_room = True
        if bad_node and (has_room := exclude_node(bad_node)):
            return self._make_bad_node(root)
        if repeated is not None:
            return self._make_deterministic(attempt, *repeated)
        no_room = (
            f"It stays on node {_name_node(root)}: the other nodes have no room for its ranks."
        )
        return Verdict(
            kind=root.nature,
            reason=_REASONS[root.nature],
            evidence=[_describe(root, attempt), *([] if has_room else [no_room])],
            remedy=self._describe_condition(root),
        )

    def list_ranks_to_replace(self, failures: Sequence[WorkerFailure]) -> set[int]:
        """Return the ranks that must have another process in the next attempt.

        If the failure is repeated there, the state of the old process is not its cause.
        """
        return find_failed_ranks(failures) if self._should_stop else set()

    # -- deterministic failures

    def _find_repetition(
        self, failures: Sequence[FailureFingerprint]
    ) -> tuple[int, FailureFingerprint, FailureFingerprint] | None:
        """Return an earlier attempt, its failure, and the same failure of this attempt."""
        if not self._should_stop or failures[0].nature not in _ELIGIBLE:
            return None
        reached = (-1, -1)  # by the attempts since then
        for number, earlier in reversed(self._attempts):
            for first, second in product(earlier, failures):
                if reached <= _get_place(first) and is_repetition(first, second, earlier, failures):
                    return number, first, second
            reached = max(reached, *map(_get_place, earlier))
        return None

    def _make_deterministic(
        self, attempt: int, number: int, first: FailureFingerprint, second: FailureFingerprint
    ) -> Verdict:
        evidence = [_describe(first, number), _describe(second, attempt)]
        if second.has_data_position:
            rank = f"rank {second.rank}, " if second.rank >= 0 else ""
            data = f" ({second.data_position})" if second.data_position else ""
            evidence.append(f"Look at the data of {rank}{second.describe_position()}{data}.")
        return Verdict(
            kind="deterministic",
            reason="the same failure has happened twice at the same place, in two processes",
            evidence=evidence,
            remedy=f"A restart would fail again: fix the code or the data. {_SWITCH_OFF}.",
            should_stop=True,
            should_retry=False,
        )

    # -- nodes

    def _find_bad_node(self, *, is_repeated: bool) -> str:
        """Return the node that caused the last failures, while others were healthy; "" if none.

        Args:
            is_repeated: Whether the last two failures are the same one, so that a failure which no
                node can cause by chance counts, too.
        """
        if self._exclude_after is None:
            return ""
        roots = [failures[0] for _, failures in self._attempts if failures]
        last = [root for root in roots if root.nature != "preemption"][-self._exclude_after :]
        if not all(root.nature in _POINTS_TO_NODE for root in last) and not is_repeated:
            return ""
        nodes = {root.node_id for root in last}
        is_suspect = len(last) == self._exclude_after and len(nodes) == 1
        return last[0].node_id if is_suspect and all(root.num_nodes > 1 for root in last) else ""

    def _make_bad_node(self, root: FailureFingerprint) -> Verdict:
        count = self._exclude_after or 0
        recent = [(number, failures[0]) for number, failures in self._attempts][-count:]
        return Verdict(
            kind="bad_node",
            reason=f"node {_name_node(root)} has caused the last {format_count(count, 'failure')} "
            "while the other nodes were healthy",
            evidence=[_describe(failure, number) for number, failure in recent],
            remedy="FailureConfig(exclude_nodes_after=None) keeps the run on its nodes.",
            excluded_node=root.node_id,
        )

    def _judge_full_disk(
        self, root: FailureFingerprint, exclude_node: Callable[[str], bool]
    ) -> Verdict:
        can_move = self._exclude_after is not None and exclude_node(root.node_id)
        return Verdict(
            kind="full_disk",
            reason=f"a disk of node {_name_node(root)} is full, so a restart there fails again",
            evidence=[_describe(root)],
            remedy=f"Free space on it. {_SWITCH_OFF}.",
            should_stop=self._should_stop and not can_move,
            excluded_node=root.node_id if can_move else "",
        )

    def _describe_condition(self, root: FailureFingerprint) -> str:
        if root.nature in ("network", "hardware", "killed", "preemption"):
            return "Failures of this kind never count as deterministic."
        if not self._should_stop:
            return "stop_when_deterministic=False: the run restarts also if this is repeated."
        where = "batch" if root.nature in _NEEDS_BATCH else "place"
        return f"If it is repeated at the same {where} in another process, the run stops."


def is_repetition(
    first: FailureFingerprint,
    second: FailureFingerprint,
    earlier: Sequence[FailureFingerprint],
    failures: Sequence[FailureFingerprint],
) -> bool:
    """Return whether two failures are the same one, at the same place, in two processes.

    Args:
        first: Failure of an earlier attempt.
        second: Failure of this attempt.
        earlier: All failures of the earlier attempt.
        failures: All failures of this attempt.
    """
    is_same_error = (
        second.nature in _ELIGIBLE
        and (first.nature, first.error) == (second.nature, second.error)
        and first.location == second.location
    )
    if not is_same_error or not _is_same_place(first, second):
        return False
    if second.nature == "hang":
        return True  # of all ranks
    if (first.hostname, first.pid) == (second.hostname, second.pid):
        return False  # the process may have caused it
    # The same batch belongs to the same rank. At the start, another rank has the same position,
    # but then half of the ranks must agree: one that fails by chance is another one each time.
    return first.rank == second.rank or (
        not second.has_data_position
        and _count_same(first, earlier) * 2 >= first.world_size
        and _count_same(second, failures) * 2 >= second.world_size
    )


def _is_same_place(first: FailureFingerprint, second: FailureFingerprint) -> bool:
    if _get_place(first) != _get_place(second):
        return False
    # With another number of ranks, a rank has other batches.
    if first.world_size != second.world_size and second.report_index + (second.num_batches or 0):
        return False
    if second.num_batches or second.nature in _NEEDS_BATCH:
        return bool(second.num_batches)
    # The report or the start may be hours ago, if Drawbar does not see the batches since then.
    longer = max(first.seconds, second.seconds)
    is_exception = second.nature in ("exception", "exit")
    difference = abs(first.seconds - second.seconds)
    return longer <= NEAR_SECONDS or (is_exception and difference <= MAX_TIME_DIFFERENCE * longer)


def _get_place(failure: FailureFingerprint) -> tuple[int, int]:
    return failure.report_index, failure.num_batches or 0


def _count_same(failure: FailureFingerprint, others: Sequence[FailureFingerprint]) -> int:
    key = (failure.error, failure.location)
    return len({other.rank for other in others if (other.error, other.location) == key})


def _is_bound_to_node(first: FailureFingerprint, second: FailureFingerprint) -> bool:
    """Return whether the node may be the cause of a repeated failure instead of code and data.

    That is the case for a failure of one node of several that depends on no data, or that concerns
    a file.
    """
    depends_on_data = second.has_data_position and not second.is_missing_file
    is_same_node = first.node_id == second.node_id
    return not depends_on_data and is_same_node and second.num_nodes > 1 and second.rank >= 0


def _name_node(failure: FailureFingerprint) -> str:
    return f"{failure.node_id[:8]} ({failure.hostname})" if failure.node_id else failure.hostname


def _describe(failure: FailureFingerprint, attempt: int | None = None) -> str:
    """Describe a failure in one sentence."""
    error = failure.error.splitlines()[0]
    rank = f"rank {failure.rank} on node {_name_node(failure)}, " if failure.rank >= 0 else ""
    process = f", process {failure.pid}" if failure.pid else ""
    location = f" ({failure.location})" if failure.location else ""
    prefix = "" if attempt is None else f"Attempt {attempt}: "
    return f"{prefix}{rank}{failure.describe_position()}{process}: {error}{location}"
