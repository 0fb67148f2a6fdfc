"""`FailureHistory`: decide from the failures of a run whether a restart can help, and where.

Pure decisions: no Ray, no I/O, no clock.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import product
from typing import NamedTuple

from msgspec.structs import replace

from drawbar._base.wording import format_count
from drawbar._failure_analysis.fingerprint import make_fingerprints
from drawbar._process.worker_failure import WorkerFailure, find_failed_ranks
from drawbar._records.verdict import FailedAttempt, FailureFingerprint, FailureNature, Verdict
from drawbar._recovery.failure_config import FailureConfig
from drawbar._recovery.failure_policy import AttemptFailures

NEAR_SECONDS = 60.0
"""Without a batch since the last report, two failures in this time after it are at one place."""

MAX_TIME_DIFFERENCE = 0.1
"""Without a batch, exceptions at two times that differ by this share are at one place, too."""

MAX_TEMPORARY_TRIES = 4
"""Number of equal failures that may be temporary, after which they count as deterministic."""

FIRST_DELAY_S = 5.0
"""Seconds to wait after the second of them. The delay doubles with each further one."""

MAX_FAILURES_PER_ATTEMPT = 32
"""Number of failures to compare and to store, besides the root cause: thousands of ranks may fail
in the same way."""

_ELIGIBLE = ("exception", "exit", "crash", "out_of_memory", "hang")
"""Natures that are deterministic if they are repeated at the same place."""

_NEEDS_BATCH = ("out_of_memory", "hang")
"""Natures that are deterministic only at the same batch."""

_POINTS_TO_NODE = ("crash", "killed", "hardware", "out_of_memory")
"""Natures that a node can cause. A network or a service is the same for all nodes."""

_REASONS: dict[FailureNature, str] = {
    "exception": "an exception of the function",
    "exit": "an exit of the function",
    "temporary": "exit code 75 (EX_TEMPFAIL): the program requests another try",
    "crash": "a crash of the process",
    "out_of_memory": "out of memory, which may depend on other processes",
    "full_disk": "a full disk",
    "network": "a failure of the network or of a remote service",
    "hardware": "an error of a device or a filesystem",
    "killed": "a process was killed from outside",
    "preemption": "a node was lost or is being removed",
    "hang": "no rank made progress",
}

_SWITCH_OFF = "FailureConfig(stop_when_deterministic=False) restarts the run anyway"


class _Repetition(NamedTuple):
    """Failure of this attempt that an earlier one has had, too.

    Attributes:
        number: Number of the latest of these attempts.
        first: Its failure.
        second: Failure of this attempt.
        tries: Number of attempts with it, including this one.
    """

    number: int
    first: FailureFingerprint
    second: FailureFingerprint
    tries: int


class FailureHistory:
    """The `FailurePolicy` of every run: compares its failures with the same settings.

    Args:
        attempts: Number of each failed attempt and its failures, the root cause first.
        config: Settings of failures.
    """

    def __init__(self, attempts: Iterable[FailedAttempt], config: FailureConfig) -> None:
        self._attempts = list(attempts)
        self._should_stop = config.stop_when_deterministic
        self._exclude_after = config.exclude_nodes_after

    def judge(self, failed: AttemptFailures, exclude_node: Callable[[str], bool]) -> Verdict | None:
        """Add the failures of an attempt, and return what follows from them.

        Args:
            failed: Failures of the attempt.
            exclude_node: Excludes a node. Returns False if the other nodes have no room.

        Returns:
            The verdict; None without failures of ranks.
        """
        failures = make_fingerprints(failed)
        if not failures:
            return None
        selected = _select(failures)
        verdict = self._judge(failed.attempt, selected, exclude_node)
        return replace(verdict, fingerprints=selected)

    def _judge(
        self,
        attempt: int,
        failures: list[FailureFingerprint],
        exclude_node: Callable[[str], bool],
    ) -> Verdict:
        root = failures[0]
        repeated = self._find_repetition(failures)
        self._attempts.append((attempt, failures))
        if repeated is not None and not _is_bound_to_node(repeated):
            return self._judge_repetition(attempt, repeated)
        if root.nature == "full_disk":
            return self._judge_full_disk(root, exclude_node)
        has_room = True
        evidence = self._list_failures_of_bad_node(is_repeated=repeated is not None)
        if evidence and (has_room := exclude_node(root.node_id)):
            return self._make_bad_node(evidence)
        if repeated is not None:
            # First find out whether it is repeated on another node.
            min_tries = self._exclude_after if has_room else None
            return self._judge_repetition(attempt, repeated, min_tries or 0)
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

    def _find_repetition(self, failures: Sequence[FailureFingerprint]) -> _Repetition | None:
        """Return the failure of this attempt that earlier attempts have had, too."""
        if not self._should_stop or failures[0].nature not in _ELIGIBLE:
            return None
        found = list[tuple[int, FailureFingerprint, FailureFingerprint]]()  # the latest first
        reached = (-1, -1)  # by the attempts since then
        for number, earlier in reversed(self._attempts):
            candidates = [failure for failure in earlier if reached <= _get_place(failure)]
            pairs = product(candidates, failures)
            if same := next((pair for pair in pairs if is_repetition(*pair)), None):
                found.append((number, *same))
            reached = max(reached, *map(_get_place, earlier))
        return _Repetition(*found[0], tries=len(found) + 1) if found else None

    def _judge_repetition(self, attempt: int, repeated: _Repetition, min_tries: int = 0) -> Verdict:
        """Return the verdict on a failure that is repeated.

        Args:
            attempt: Number of the attempt.
            repeated: The repetition.
            min_tries: Number of tries below which it is not deterministic yet.
        """
        number, first, second, tries = repeated
        evidence = [_describe(first, number), _describe(second, attempt)]
        is_temporary = _may_be_temporary(second)
        needed = max(min_tries, MAX_TEMPORARY_TRIES if is_temporary else 0)
        if tries < needed:
            cause = "The cause may be temporary" if is_temporary else "The node may be the cause"
            return Verdict(
                kind=second.nature,
                reason=f"{_REASONS[second.nature]}, repeated at the same place",
                evidence=evidence,
                remedy=f"{cause}: the run restarts until it has happened {needed} times.",
                delay_seconds=FIRST_DELAY_S * 2 ** (tries - 2) if is_temporary else 0.0,
            )
        if second.has_data_position:
            rank = f"rank {second.rank}, " if second.rank >= 0 else ""
            data = f" ({second.data_position})" if second.data_position else ""
            evidence.append(f"Look at the data of {rank}{second.describe_position()}{data}.")
        return Verdict(
            kind="deterministic",
            reason=f"the same failure has happened {_format_tries(tries)}",
            evidence=evidence,
            remedy=f"A restart would fail again: fix the code or the data. {_SWITCH_OFF}.",
            should_stop=True,
            should_retry=False,
        )

    # -- nodes

    def _list_roots(self) -> list[tuple[int, FailureFingerprint]]:
        """Return the attempts and their root causes, without lost nodes."""
        roots = [(number, failures[0]) for number, failures in self._attempts if failures]
        return [(number, root) for number, root in roots if root.nature != "preemption"]

    def _list_failures_of_bad_node(
        self, *, is_repeated: bool
    ) -> list[tuple[int, FailureFingerprint]]:
        """Return the last failures, if one node caused them while others were healthy.

        Args:
            is_repeated: Whether the last two failures are the same one, so that a failure which no
                node can cause by chance counts, too.

        Returns:
            Number of each attempt and its root cause; empty if no node is the cause.
        """
        if self._exclude_after is None:
            return []
        last = self._list_roots()[-self._exclude_after :]
        is_bad = len(last) == self._exclude_after and all(
            root.node_id == last[-1][1].node_id != ""
            and root.num_nodes > 1
            and (root.nature in _POINTS_TO_NODE or is_repeated)
            for _, root in last
        )
        return last if is_bad else []

    def _make_bad_node(self, evidence: Sequence[tuple[int, FailureFingerprint]]) -> Verdict:
        root = evidence[-1][1]
        return Verdict(
            kind="bad_node",
            reason=f"node {_name_node(root)} has caused the last "
            f"{format_count(len(evidence), 'failure')} while the other nodes were healthy",
            evidence=[_describe(failure, number) for number, failure in evidence],
            remedy="FailureConfig(exclude_nodes_after=None) keeps the run on its nodes.",
            excluded_node=root.node_id,
        )

    def _judge_full_disk(
        self, root: FailureFingerprint, exclude_node: Callable[[str], bool]
    ) -> Verdict:
        others = [failure for _, failure in self._list_roots()[-2:-1]]
        is_shared = any(
            other.nature == "full_disk" and other.node_id != root.node_id for other in others
        )
        can_move = self._exclude_after is not None and not is_shared and exclude_node(root.node_id)
        reason = f"a disk of node {_name_node(root)} is full, so a restart there fails again"
        if is_shared:
            reason = "a disk was full on two nodes in a row, so the nodes probably share it"
        return Verdict(
            kind="full_disk",
            reason=reason,
            evidence=[_describe(root)],
            remedy=f"Free space on it. {_SWITCH_OFF}.",
            should_stop=self._should_stop and not can_move,
            excluded_node=root.node_id if can_move else "",
        )

    def _describe_condition(self, root: FailureFingerprint) -> str:
        if root.nature in ("temporary", "network", "hardware", "killed", "preemption"):
            return "Failures of this kind never count as deterministic."
        if not self._should_stop:
            return "stop_when_deterministic=False: the run restarts also if this is repeated."
        where = "batch" if root.nature in _NEEDS_BATCH else "place"
        return f"If it is repeated at the same {where} in another process, the run stops."


def _select(failures: Sequence[FailureFingerprint]) -> list[FailureFingerprint]:
    """Return the root cause and the failures that can be deterministic, of the lowest ranks."""
    counts = Counter((failure.error, failure.location) for failure in failures)
    eligible = [failure for failure in failures[1:] if failure.nature in _ELIGIBLE]
    eligible.sort(key=lambda failure: failure.rank)
    return [
        replace(failure, num_ranks=counts[failure.error, failure.location])
        for failure in [failures[0], *eligible[:MAX_FAILURES_PER_ATTEMPT]]
    ]


def is_repetition(first: FailureFingerprint, second: FailureFingerprint) -> bool:
    """Return whether two failures are the same one, at the same place, in two processes.

    Args:
        first: Failure of an earlier attempt.
        second: Failure of this attempt.
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
        and first.num_ranks * 2 >= first.world_size
        and second.num_ranks * 2 >= second.world_size
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


def _may_be_temporary(failure: FailureFingerprint) -> bool:
    """Return whether a service that is unavailable for a while can be the cause of a failure.

    That is the case for an exception soon after the start, before any batch or report, unless its
    type shows that the code is wrong.
    """
    is_exception = failure.nature == "exception" and not failure.is_code_error
    return is_exception and not failure.has_data_position and failure.seconds <= NEAR_SECONDS


def _format_tries(tries: int) -> str:
    if tries == 2:
        return "twice at the same place, in two processes"
    return f"{tries} times at the same place, in different processes"


def _is_bound_to_node(repeated: _Repetition) -> bool:
    """Return whether the node may be the cause of a repeated failure instead of code and data.

    That is the case for a failure of one node of several that depends on no data, or that concerns
    a file.
    """
    first, second = repeated.first, repeated.second
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
