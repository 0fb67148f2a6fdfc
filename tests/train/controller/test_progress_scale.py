"""Bookkeeping of many ranks: the same results as the oracle, with few operations per message.

`python -m tests.train.controller.test_progress_scale NUMBER [SEED]` runs more random histories, and
prints how often each kind of message and result occurred.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable
from random import Random
from types import FrameType, SimpleNamespace
from typing import Any, cast

import pytest

from drawbar._base.indexed_heap import IndexedHeap
from drawbar._records.batch_counts import BatchCountCheck
from drawbar._records.events import ShardEpochEnded
from drawbar.train._config.checkpoint_modes import CheckpointConsistencyMode
from drawbar.train._controller.checkpoint_coordinator import CheckpointQueries
from drawbar.train._controller.checkpoint_registry import CheckpointRegistry
from drawbar.train._controller.commits import CheckpointCommitter
from drawbar.train._controller.progress import AttemptProgress
from drawbar.train._controller.validations import ValidationScheduler
from drawbar.train._protocol.messages import (
    CheckpointListRequest,
    CheckpointOffer,
    CollectiveCalled,
    Report,
)
from tests.train.controller.progress_histories import History

NUM_HISTORIES = 2000
COVERED = {
    "collectives": 500,
    "divergence: collective and checkpoint": 200,
    "divergence: finished rank": 200,
    "divergence: two collectives": 200,
    "on_checkpoints_reply": 500,
    "on_checkpoints_requested": 500,
    "on_collective": 2000,
    "on_committed": 500,
    "on_finished": 2000,
    "on_report": 2000,
    "on_waiting_for_checkpoint": 200,
    "rounds": 500,
}
"""Kinds of messages and results, and how often they must occur in all histories."""


def run_histories(seeds: range) -> Counter[str]:
    """Run a history for each seed. Return the number of messages and results, by kind."""
    counts: Counter[str] = Counter()
    for seed in seeds:
        try:
            counts += History(seed).run()
        except AssertionError:
            print(f"history {seed} differs")
            raise
    return counts


def test_progress_agrees_with_oracle_on_random_histories() -> None:
    counts = run_histories(range(NUM_HISTORIES))
    assert {kind for kind, minimum in COVERED.items() if counts[kind] < minimum} == set()


def test_divergence_is_not_suspected_after_commit_of_older_checkpoint() -> None:
    progress = AttemptProgress(2, 0)
    for index in range(2):
        progress.on_report(0, make_report(index, has_offer=True))
    progress.on_waiting_for_checkpoint(0, 0)
    progress.on_report(1, make_report(0, has_offer=False))
    progress.on_committed(0)
    call = CollectiveCalled(sequence=0, number=0, kind="barrier", payload=None, location="")
    progress.on_collective(1, call)
    assert not progress._divergence.is_suspected


def count_operations(function: Callable[..., object], *args: object) -> int:
    """Return the number of bytecode instructions that a function executes."""
    count = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    previous = sys.gettrace()
    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(previous)
    return count


def send_to_all(progress: AttemptProgress, method: str, message: object) -> None:
    for rank in progress.ranks:
        getattr(progress, method)(rank, message)
        assert progress.find_divergence() is None


def make_report(index: int, *, has_offer: bool, waits: bool = False) -> Report:
    offer = (
        CheckpointOffer(directory="", files=(), checkpoint_name=f"{index}") if has_offer else None
    )
    return Report(index=index, metrics={}, time=0, location="", offer=offer, is_blocking=waits)


def call_barriers(progress: AttemptProgress) -> None:
    for number in range(3):
        call = CollectiveCalled(
            sequence=number, number=number, kind="barrier", payload=None, location=""
        )
        send_to_all(progress, "on_collective", call)


def report_metrics_before_a_slow_rank(progress: AttemptProgress) -> None:
    progress.on_report(0, make_report(0, has_offer=True))
    for rank in range(1, len(progress.ranks)):
        for index in range(3):
            progress.on_report(rank, make_report(index, has_offer=False))
            assert progress.find_divergence() is None


def report_checkpoints(progress: AttemptProgress) -> None:
    for index in range(3):
        send_to_all(progress, "on_report", make_report(index, has_offer=True, waits=True))
        progress.on_committed(index)


def report_pending_checkpoints_before_a_slow_rank(progress: AttemptProgress) -> None:
    for index in range(3):
        for rank in range(1, len(progress.ranks)):
            progress.on_report(rank, make_report(index, has_offer=True))
            assert progress.find_divergence() is None
    for index in range(3):
        progress.on_report(0, make_report(index, has_offer=False))


def request_checkpoints(progress: AttemptProgress) -> None:
    until = CheckpointConsistencyMode.COMMITTED
    for index in range(3):
        send_to_all(progress, "on_report", make_report(index, has_offer=False))
        request = CheckpointListRequest(request_id=index, consistency_mode=until)
        send_to_all(progress, "on_checkpoints_requested", request)
        for rank in progress.ranks:
            progress.on_checkpoints_reply(rank)
            assert progress.next_running_report == index + 1


def finish(progress: AttemptProgress) -> None:
    for rank in progress.ranks:
        progress.on_finished(rank)
        assert progress.find_divergence() is None


def look_at_activity_during_barrier(progress: AttemptProgress) -> None:
    call = CollectiveCalled(sequence=0, number=0, kind="barrier", payload=None, location="")
    for rank in range(len(progress.ranks) // 2):
        progress.on_collective(rank, call)
    progress.get_activity(dict.fromkeys(progress.ranks, 0.0), {})


def request_uncommitted_checkpoints(progress: AttemptProgress) -> None:
    commits = SimpleNamespace(first_uncommitted=0)
    validations = SimpleNamespace(first_pending=math.inf)
    replies: list[int] = []
    queries = CheckpointQueries(
        progress,
        cast(CheckpointRegistry, SimpleNamespace(list_entries=tuple)),
        cast(CheckpointCommitter, commits),
        cast(ValidationScheduler, validations),
        lambda rank, _: replies.append(rank),
    )
    send_to_all(progress, "on_report", make_report(0, has_offer=False))
    for rank in progress.ranks:
        queries.add(
            rank,
            CheckpointListRequest(
                request_id=0, consistency_mode=CheckpointConsistencyMode.COMMITTED
            ),
        )
        queries.send_ready_replies()
    assert replies == []
    commits.first_uncommitted = math.inf
    queries.send_ready_replies()
    assert replies == list(progress.ranks)


def end_epochs(progress: AttemptProgress) -> None:
    check = BatchCountCheck(len(progress.ranks))
    for rank in progress.ranks:
        shard_epoch = ShardEpochEnded(
            dataset="train",
            epoch=0,
            previous_reads=[],
            shard_index=rank,
            num_shards=len(progress.ranks),
            num_rows=None,
            num_batches=10,
            is_shuffled=False,
            is_complete=True,
            total_rows=None,
            uneven_rows="drop",
        )
        assert check.add(rank, shard_epoch) == ""


@pytest.mark.parametrize(
    "send_messages",
    [
        call_barriers,
        report_metrics_before_a_slow_rank,
        report_checkpoints,
        report_pending_checkpoints_before_a_slow_rank,
        request_checkpoints,
        request_uncommitted_checkpoints,
        end_epochs,
        finish,
        look_at_activity_during_barrier,
    ],
)
def test_operations_per_rank_do_not_grow_with_world_size(
    send_messages: Callable[[AttemptProgress], None],
) -> None:
    operations = {}
    for world_size in (8, 64):
        progress = AttemptProgress(world_size, 0)
        operations[world_size] = count_operations(send_messages, progress) / world_size
    # A walk over all ranks at each message makes the ratio about 8.
    assert operations[64] < 1.3 * operations[8]


def test_indexed_heap_agrees_with_dictionary() -> None:
    random = Random(0)
    heap, expected = IndexedHeap[int](), dict[int, int]()
    for _ in range(5000):
        key, value = random.randrange(20), random.randrange(50)
        if random.random() < 0.6:
            heap.set(key, value)
            expected[key] = value
        elif random.random() < 0.9:
            heap.discard(key)
            expected.pop(key, None)
        else:
            limit = random.randrange(10)
            keys = heap.pop_up_to(limit)
            assert keys == sorted(keys, key=lambda key: (expected[key], key))
            assert set(keys) == {key for key, value in expected.items() if value <= limit}
            for key in keys:
                del expected[key]
        assert heap.smallest == min(expected.values(), default=math.inf)
        assert sorted(heap.values()) == sorted(expected.values())
        assert len(heap) == len(expected)


def test_indexed_heap_drops_outdated_entries() -> None:
    heap = IndexedHeap[int]()
    heap.set(0, 0)
    for value in range(1, 10_000):
        heap.set(1, value)
    assert heap.smallest == 0
    assert len(heap._entries) < 20


def main() -> None:
    """Run the number of histories that the command line requests."""
    number, first_seed = int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0
    counts = run_histories(range(first_seed, first_seed + number))
    print(f"{number} histories agree:")
    for kind, count in sorted(counts.items()):
        print(f"  {kind:40} {count:,}")


if __name__ == "__main__":
    main()
