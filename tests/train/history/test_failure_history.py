"""Causes of failures, from a single failure and from several, without Ray."""

from __future__ import annotations

import builtins
import itertools
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest

from drawbar._failure_analysis.failure_history import FailureHistory
from drawbar._failure_analysis.fingerprint import find_nature
from drawbar._process.ranks import WorkerInfo
from drawbar._process.worker_failure import WorkerFailure
from drawbar._records.events import AttemptEnded, JournaledEvent, RunStarted
from drawbar._records.verdict import FailureFingerprint, Verdict
from drawbar._recovery.failure_config import FailureConfig
from drawbar._recovery.failure_policy import AttemptFailures, list_failed_attempts

WORKERS = [
    WorkerInfo(node_id="a" * 8, node_ip="10.0.0.1", hostname="one", pid=10),
    WorkerInfo(node_id="b" * 8, node_ip="10.0.0.2", hostname="two", pid=20),
]


def fail(type_name: str = "ValueError", message: str = "bad", **fields: Any) -> WorkerFailure:
    kind = fields.pop("kind", "exception")
    values = {"rank": 1, "location": "train.py:7 in f", "time": 100.0, "num_batches": 3, **fields}
    values.setdefault("builtin_type", type_name if hasattr(builtins, type_name) else "")
    return WorkerFailure(kind=kind, type_name=type_name, message=message, **values)


def die(message: str, **fields: Any) -> WorkerFailure:
    return fail("worker process died", message, kind="died", location="", **fields)


@pytest.mark.parametrize(
    ("failure", "nature"),
    [
        (fail("ValueError", "input contains NaN", builtin_type="ValueError"), "exception"),
        (fail("ImportError", "cannot import name 'x'"), "exception"),
        (fail("FileNotFoundError", "[Errno 2] File not found: 'x'"), "exception"),
        (fail("SystemExit", "3", kind="exit"), "exit"),
        (die("killed by SIGSEGV: Fatal Python error: Segmentation fault"), "crash"),
        (die("killed by SIGABRT"), "crash"),
        (die("exited with code 3 by os._exit or sys.exit"), "exit"),
        (die("killed by SIGTERM"), "killed"),
        (
            die("killed by SIGKILL, from outside, not by the kernel's OOM killer (its count did)"),
            "killed",
        ),
        (die("killed by SIGKILL, by the kernel's OOM killer: the cgroup's count"), "out_of_memory"),
        (die("killed by Ray's memory monitor: Memory on the node"), "out_of_memory"),
        (die("for an unknown reason, such as SIGKILL from outside or os._exit"), "killed"),
        (fail("MemoryError", ""), "out_of_memory"),
        (fail("OutOfMemoryError", "CUDA out of memory. Tried to allocate 2 GiB"), "out_of_memory"),
        (fail("_ArrayMemoryError", "Unable to allocate 8 GiB"), "out_of_memory"),
        (fail("XlaRuntimeError", "RESOURCE_EXHAUSTED: Out of memory"), "out_of_memory"),
        (
            fail("RuntimeError", "DataLoader worker (pid 7) is killed by signal: Killed."),
            "out_of_memory",
        ),
        (fail("OSError", "[Errno 28] No space left on device"), "full_disk"),
        (fail("RuntimeError", "writing failed: No space left on device"), "full_disk"),
        (fail("ConnectionRefusedError", "[Errno 111] Connection refused"), "network"),
        (fail("ReadTimeout", "HTTPSConnectionPool(host='s3')"), "network"),
        (fail("RuntimeError", "[gloo] Connection closed by peer [10.0.0.2]:4711"), "network"),
        (
            fail("RuntimeError", "cannot read the shard", traceback="ConnectionError: x\n\nThe"),
            "network",
        ),
        (fail("StoreError", "no reply", builtin_type="TimeoutError"), "network"),
        (fail("ValueError", "unknown option 'timeout'", builtin_type="ValueError"), "exception"),
        (fail("RuntimeError", "CUDA error: uncorrectable ECC error encountered"), "hardware"),
        (fail("OSError", "[Errno 5] Input/output error", builtin_type="OSError"), "hardware"),
        (fail("OSError", "3 requested and 0 written", builtin_type="OSError"), "hardware"),
        (
            fail("OSError", "gpt9 is not a valid model identifier", builtin_type="OSError"),
            "exception",
        ),
        (fail("no progress", "no rank made progress for 3 s", kind="hang", rank=-1), "hang"),
    ],
)
def test_find_nature_of_single_failure(failure: WorkerFailure, nature: str) -> None:
    assert find_nature(failure) == nature


class Run:
    """A run whose attempts fail one after another, each in new processes."""

    def __init__(self, *, stop: bool = True, exclude: int | None = None, room: bool = True) -> None:
        config = FailureConfig(stop_when_deterministic=stop, exclude_nodes_after=exclude)
        self.history = FailureHistory([], config)
        self.attempt = -1
        self.has_room = room
        self.workers = WORKERS

    def fail(self, *failures: WorkerFailure, cause: str = "worker", first: int = 0) -> Verdict:
        self.attempt += 1
        pids = [msgspec.structs.replace(each, pid=each.pid or self.attempt) for each in failures]
        failed = AttemptFailures(
            attempt=self.attempt,
            cause=cause,
            failures=pids,
            workers=self.workers,
            first_report_index=first,
            last_report_times=dict.fromkeys(range(len(self.workers)), 90.0),
        )
        verdict = self.history.judge(failed, lambda node: self.has_room)
        assert verdict is not None
        return verdict


def test_same_exception_at_same_batch_is_deterministic() -> None:
    run = Run()
    first = run.fail(fail("KeyError", "no key 17 in 0x7f00", num_reports=4))
    assert (first.kind, first.should_stop) == ("exception", False)
    # The second attempt resumes from the checkpoint of report 3, so it has made fewer reports.
    failure = fail(
        "KeyError", "no key 18 in 0x7f99", num_reports=1, data_position="epoch 2, rows 5"
    )
    second = run.fail(failure, first=3)
    assert (second.kind, second.should_stop, second.should_retry) == ("deterministic", True, False)
    text = second.explain_end(second.reason)
    assert "Attempt 0: rank 1 on node bbbbbbbb (two), batch 3 after 4 reports" in text
    assert "Look at the data of rank 1, batch 3 after 4 reports (epoch 2, rows 5)." in text
    assert "FailureConfig(stop_when_deterministic=False)" in text
    assert not text.endswith(".")


@pytest.mark.parametrize(
    "second",
    [
        fail(message="other"),
        fail("TypeError"),
        fail(location="train.py:8 in f"),
        fail(num_batches=4),
        fail(num_reports=1),
        fail(num_batches=None),
        fail(rank=0),
        fail(pid=100),  # the process of the first attempt
        die("killed by SIGSEGV"),
    ],
)
def test_other_failure_or_place_or_same_process_is_not_deterministic(second: WorkerFailure) -> None:
    run = Run()
    run.fail(fail(pid=100))
    assert not run.fail(second).should_stop


@pytest.mark.parametrize("message", ["killed by SIGSEGV: stack 1", "killed by SIGABRT"])
def test_same_signal_at_same_batch_is_deterministic(message: str) -> None:
    run = Run()
    assert run.fail(die(message)).kind == "crash"
    assert run.fail(die(message)).kind == "deterministic"


def test_crash_location_is_the_user_line_of_faulthandler() -> None:
    stack = 'Current thread 0x1 (most recent call first):\n  File "/x/train.py", line 3 in step'
    failure = die(
        f"killed by SIGSEGV: Fatal Python error: Segmentation fault\n\n{stack}\n\nThread 2"
    )
    (fingerprint,) = Run().fail(failure).fingerprints
    assert fingerprint.location == "/x/train.py:3 in step"


@pytest.mark.parametrize(
    "failure",
    [
        fail("ConnectionRefusedError", "[Errno 111] Connection refused"),
        fail("OSError", "[Errno 5] Input/output error"),
        die("killed by SIGKILL, from outside"),
        die("killed by SIGTERM"),
    ],
)
def test_environment_failures_are_never_deterministic(failure: WorkerFailure) -> None:
    run = Run()
    assert not any(run.fail(failure).should_stop for _ in range(5))


def test_preemption_is_never_deterministic() -> None:
    run = Run()
    verdicts = [run.fail(die("killed by SIGSEGV"), cause="preemption") for _ in range(3)]
    assert {(verdict.kind, verdict.should_stop) for verdict in verdicts} == {("preemption", False)}


def test_out_of_memory_is_deterministic_only_at_the_same_batch() -> None:
    oom = "killed by SIGKILL, by the kernel's OOM killer: the cgroup's count rose"
    run = Run()
    assert run.fail(die(oom)).kind == "out_of_memory"
    assert run.fail(die(oom, num_batches=9)).kind == "out_of_memory"
    assert run.fail(die(oom, num_batches=9)).kind == "deterministic"
    at_start = Run()
    assert not any(at_start.fail(die(oom, num_batches=0)).should_stop for _ in range(3))


@pytest.mark.parametrize(
    ("times", "is_deterministic"),
    [((92, 95), True), ((400, 410), True), ((400, 500), False), ((92, 300), False)],
)
def test_exception_without_data_needs_a_similar_time(
    times: tuple[float, float], is_deterministic: bool
) -> None:
    run = Run()
    run.fail(fail(num_batches=0, time=times[0]))
    assert run.fail(fail(num_batches=0, time=times[1])).should_stop == is_deterministic


@pytest.mark.parametrize(("seconds", "is_deterministic"), [(20, True), (2000, False)])
def test_failure_without_batches_needs_a_similar_time_since_the_report(
    seconds: float, is_deterministic: bool
) -> None:
    run = Run()
    run.fail(fail(num_batches=0, num_reports=3, time=90 + seconds))
    second = fail(num_batches=0, num_reports=0, time=90 + seconds / 2)
    assert run.fail(second, first=3).should_stop == is_deterministic


def test_crash_without_data_is_deterministic_only_at_the_start() -> None:
    for time, is_deterministic in ((95, True), (400, False)):
        run = Run()
        run.fail(die("killed by SIGSEGV", num_batches=0, time=time))
        verdict = run.fail(die("killed by SIGSEGV", num_batches=0, time=time))
        assert verdict.should_stop == is_deterministic


def test_error_at_the_start_on_other_ranks_needs_half_of_the_ranks() -> None:
    error = fail("ImportError", "no module x", num_batches=0, rank=0)
    flaky = Run()
    flaky.workers = [*WORKERS, *WORKERS]
    assert not flaky.fail(error).should_stop
    assert not flaky.fail(msgspec.structs.replace(error, rank=1)).should_stop
    missing = Run()
    everywhere = [error, msgspec.structs.replace(error, rank=1)]
    missing.fail(*[msgspec.structs.replace(each, pid=100 + each.rank) for each in everywhere])
    again = [msgspec.structs.replace(each, pid=101 - each.rank) for each in everywhere]
    assert missing.fail(*again).should_stop


def test_attempt_that_got_further_refutes_the_repetition() -> None:
    run = Run()
    run.fail(fail(num_batches=3))
    run.fail(fail("TypeError", num_batches=9))
    assert not run.fail(fail(num_batches=3)).should_stop
    preempted = Run()
    preempted.fail(fail(num_batches=3))
    preempted.fail(die("killed by SIGKILL", num_batches=1), cause="preemption")
    assert preempted.fail(fail(num_batches=3)).should_stop


def test_hang_is_deterministic_at_the_same_lines_and_data() -> None:
    numbers = itertools.count(11)

    def hang(num_batches: int | None, num_reports: int = 7) -> WorkerFailure:
        # After a restart, the same collective has another number.
        missing = f"rank 1 never entered all_reduce #{next(numbers)}, in which rank 0 waits"
        message = (
            f"no rank made progress for 3 s\n  rank 1: a.py:3\n  {missing}\nstacks: /run/stacks"
        )
        place: dict[str, Any] = {"num_batches": num_batches, "num_reports": num_reports}
        return fail("no progress", message, kind="hang", rank=-1, location="", **place)

    for num_batches, is_deterministic in ((3, True), (0, False), (None, False)):
        run = Run()
        assert run.fail(hang(num_batches), cause="hang").kind == "hang"
        assert run.fail(hang(num_batches), cause="hang").should_stop == is_deterministic
    run = Run()
    run.fail(hang(3), cause="hang")
    assert not run.fail(hang(3, num_reports=8), cause="hang").should_stop


def test_stop_when_deterministic_false_never_stops() -> None:
    run = Run(stop=False)
    assert not any(run.fail(fail()).should_stop for _ in range(3))
    assert not run.fail(fail("OSError", "No space left on device")).should_stop


@pytest.mark.parametrize("has_room", [True, False])
def test_node_with_failures_at_other_places_is_excluded(has_room: bool) -> None:
    run = Run(exclude=2, room=has_room)
    assert run.fail(die("killed by SIGSEGV", num_batches=3)).kind == "crash"
    verdict = run.fail(fail("RuntimeError", "uncorrectable ECC error", num_batches=8))
    assert verdict.kind == ("bad_node" if has_room else "hardware")
    assert verdict.excluded_node == ("b" * 8 if has_room else "")
    assert has_room or "no room" in verdict.describe()
    assert not verdict.should_stop


def test_node_is_not_excluded_after_failures_elsewhere_or_without_other_nodes() -> None:
    run = Run(exclude=2)
    run.fail(die("killed by SIGSEGV", num_batches=3))
    assert run.fail(die("killed by SIGSEGV", num_batches=4, rank=0)).excluded_node == ""
    alone = Run(exclude=2)
    alone.workers = WORKERS[:1] * 2
    alone.fail(die("killed by SIGSEGV", num_batches=3))
    assert alone.fail(die("killed by SIGSEGV", num_batches=4)).excluded_node == ""


def test_network_and_plain_exceptions_do_not_exclude_a_node() -> None:
    run = Run(exclude=2)
    for number in range(4):
        run.fail(fail("ConnectionError", "refused", num_batches=number))
        assert run.fail(fail(num_batches=number)).excluded_node == ""


@pytest.mark.parametrize("has_room", [True, False])
def test_repeated_error_at_the_start_of_one_node_is_tried_elsewhere(has_room: bool) -> None:
    run = Run(exclude=2, room=has_room)
    error = fail("ImportError", "libcuda.so.1: cannot open shared object file", num_batches=0)
    run.fail(error)
    verdict = run.fail(error)
    assert verdict.kind == ("bad_node" if has_room else "deterministic")


def test_repeated_error_of_one_node_ends_the_run_only_when_the_node_cannot_be_left() -> None:
    error = fail(
        "ImportError", "libcuda.so.1: cannot open", num_batches=0, builtin_type="ImportError"
    )
    run = Run(exclude=3)
    run.fail(error)
    second = run.fail(error)
    assert (second.kind, second.should_stop, second.delay_seconds) == ("exception", False, 0)
    assert "The node may be the cause: the run restarts until it has happened 3 times" in (
        second.describe()
    )
    third = run.fail(error)
    assert (third.kind, third.excluded_node) == ("bad_node", "b" * 8)
    assert len(third.evidence) == 3
    crowded = Run(exclude=3, room=False)
    assert [crowded.fail(error).should_stop for _ in range(3)] == [False, False, True]


def test_evidence_of_bad_node_does_not_contain_a_preemption() -> None:
    run = Run(exclude=2)
    run.fail(die("killed by SIGSEGV", num_batches=3))
    run.fail(die("killed by SIGTERM", rank=0), cause="preemption")
    verdict = run.fail(die("killed by SIGSEGV", num_batches=4))
    assert verdict.kind == "bad_node"
    assert [line.partition(":")[0] for line in verdict.evidence] == ["Attempt 0", "Attempt 2"]


def test_quick_exceptions_at_the_start_are_deterministic_at_the_fourth_time() -> None:
    down = fail("StoreError", "no answer", builtin_type="Exception", num_batches=0, time=90.5)
    run = Run()
    verdicts = [run.fail(down) for _ in range(4)]
    assert [verdict.should_stop for verdict in verdicts] == [False, False, False, True]
    assert [verdict.delay_seconds for verdict in verdicts] == [0, 5, 10, 0]
    assert "has happened 4 times at the same place, in different processes" in verdicts[3].reason
    for changes in ({"builtin_type": "TypeError"}, {"num_batches": 3}, {"time": 400.0}):
        run = Run()
        run.fail(msgspec.structs.replace(down, **changes))
        assert run.fail(msgspec.structs.replace(down, **changes)).should_stop


@pytest.mark.parametrize(
    "failure",
    [
        fail("SystemExit", "75", kind="exit", num_batches=0),
        fail("program ended", "exited with code 75", kind="exit", num_batches=0),
        die("exited with code 75 by os._exit or sys.exit", num_batches=0),
        fail("SystemExit", "75", builtin_type="SystemExit", num_batches=0),
    ],
)
def test_exit_code_75_is_temporary(failure: WorkerFailure) -> None:
    run = Run()
    verdicts = [run.fail(failure) for _ in range(6)]
    assert {(verdict.kind, verdict.should_stop) for verdict in verdicts} == {("temporary", False)}


def test_failure_of_thousands_of_ranks_is_compared_and_stored_for_some() -> None:
    run = Run()
    run.workers = WORKERS * 2000
    errors = [fail(rank=rank, num_batches=3) for rank in range(4000)]
    lost = [fail("RuntimeError", "Connection closed by peer", rank=rank) for rank in range(4000)]
    first = run.fail(errors[17], *lost)
    assert [each.rank for each in first.fingerprints] == [17]
    run = Run()
    run.workers = WORKERS * 2000
    first = run.fail(errors[99], *errors[:99], *errors[100:])
    assert len(first.fingerprints) == 33
    assert first.fingerprints[0].num_ranks == 4000
    assert run.fail(*errors[::-1]).should_stop


def test_node_of_a_dead_process_is_not_that_of_its_replacement() -> None:
    death = die("killed by SIGSEGV", node_id="c" * 8, hostname="three")
    (fingerprint,) = Run().fail(death).fingerprints
    assert (fingerprint.node_id, fingerprint.hostname) == ("c" * 8, "three")


def test_full_disk_on_two_nodes_in_a_row_ends_the_run() -> None:
    run = Run(exclude=2)
    full = fail("OSError", "[Errno 28] No space left on device")
    assert run.fail(full).excluded_node == "b" * 8
    verdict = run.fail(msgspec.structs.replace(full, rank=0))
    assert (verdict.should_stop, verdict.excluded_node) == (True, "")
    assert "the nodes probably share it" in verdict.reason


def test_full_disk_leaves_the_node_or_stops_and_may_be_retried_later() -> None:
    failure = fail("OSError", "[Errno 28] No space left on device")
    moved = Run(exclude=2).fail(failure)
    assert (moved.kind, moved.excluded_node, moved.should_stop) == ("full_disk", "b" * 8, False)
    stopped = Run(exclude=2, room=False).fail(failure)
    assert (stopped.should_stop, stopped.should_retry) == (True, True)


def test_failed_attempts_count_until_the_settings_change() -> None:
    def start(config: dict[str, object]) -> JournaledEvent:
        return RunStarted(time=0.0, run_id="x", name="run", config=config)

    def end(attempt: int) -> JournaledEvent:
        fingerprints = [FailureFingerprint(rank=0, nature="exception", error=f"{attempt}")]
        verdict = Verdict(kind="exception", reason="", fingerprints=fingerprints)
        return AttemptEnded(
            time=0.0, attempt=attempt, cause="worker", failure_headlines=[], verdict=verdict
        )

    def numbers(*events: JournaledEvent) -> Sequence[int]:
        return [number for number, _ in list_failed_attempts(events)]

    small: dict[str, object] = {"batch_size": 8}
    assert numbers(start(small), end(0), start(small), end(1), start(small)) == [0, 1]
    assert numbers(start(small), end(0), start({"batch_size": 4}), end(1)) == [1]
    assert numbers(start(small), end(0), start({"batch_size": 4})) == []
