"""Attempts that run in one process in turn: commands and interrupts of an earlier attempt."""

from __future__ import annotations

import contextlib
import threading
from pathlib import Path

import pytest

from drawbar.train._protocol.assignment import Ranks, WorkerAssignment, WorkerSpec
from drawbar.train._protocol.commands import CommitCompleted
from drawbar.train._protocol.messages import Message
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._worker.rank_runner import RankRunner
from drawbar.train._worker.training_thread import AttemptInterrupted, InterruptScope


def make_assignment(path: Path, attempt: int) -> WorkerAssignment:
    return WorkerAssignment(
        spec=WorkerSpec(env_vars={}, driver_env=None, metadata={}),
        run_id="r",
        run_directory=RunDirectory(path),
        attempt=attempt,
        first_report_index=0,
        ranks=Ranks(
            world_rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            node_rank=0,
            num_nodes=1,
        ),
    )


def test_command_of_earlier_attempt_is_ignored(tmp_path: Path) -> None:
    runner = RankRunner()
    messages: list[Message] = []
    command = CommitCompleted(report_index=0, checkpoint_name="checkpoint_000000")
    runner.handle_command(command, attempt=0)  # before the first attempt
    for attempt in (0, 1):
        session = runner.start_attempt(make_assignment(tmp_path, attempt), messages.append)
    runner.handle_command(command, attempt=0)
    assert session.checkpoint is None
    runner.handle_command(command, attempt=1)
    assert session.checkpoint is not None


# -- interrupts


def run_until_interrupted(scope: InterruptScope, started: threading.Event) -> None:
    scope.begin()
    started.set()
    while True:
        pass


def test_interrupt_of_running_code_raises_in_its_thread() -> None:
    scope, started, ended = InterruptScope(), threading.Event(), threading.Event()

    def user_code() -> None:
        try:
            run_until_interrupted(scope, started)
        except AttemptInterrupted:
            ended.set()

    threading.Thread(target=user_code, daemon=True).start()
    started.wait()
    scope.interrupt()
    assert ended.wait(300)


def test_interrupt_before_begin_raises_in_begin() -> None:
    scope = InterruptScope()
    scope.interrupt()
    with pytest.raises(AttemptInterrupted):
        scope.begin()


def test_interrupt_after_end_has_no_effect() -> None:
    scope = InterruptScope()
    scope.begin()
    scope.end()
    scope.interrupt()
    assert [number for number in range(1000) if number < 0] == []


@pytest.mark.timeout(60)
def test_interrupt_discarded_by_end_keeps_traced_thread_running() -> None:
    """In Python 3.11, an exception that stays pending stops all functions of a traced thread."""
    for is_late in (False, True):
        scope, ended = InterruptScope(), threading.Event()

        def user_code(scope: InterruptScope, is_late: bool, ended: threading.Event) -> None:
            with contextlib.suppress(AttemptInterrupted):
                scope.begin()
                if is_late:
                    scope.interrupt()
                scope.end()
            [abs(number) for number in range(1000)]
            ended.set()

        threading.setprofile(lambda *_: None)
        try:
            arguments = (scope, is_late, ended)
            threading.Thread(target=user_code, args=arguments, daemon=True).start()
        finally:
            threading.setprofile(None)
        assert ended.wait(300)


@pytest.mark.parametrize("is_sent", [False, True])
def test_raise_interrupt_in_user_thread_prevents_second_exception(is_sent: bool) -> None:
    scope = InterruptScope()
    scope.begin()
    if is_sent:
        with contextlib.suppress(AttemptInterrupted):
            interrupt_and_run(scope)
    with pytest.raises(AttemptInterrupted, match="over"):
        scope.raise_interrupt("over")
    interrupt_and_run(scope)
    scope.end()


def interrupt_and_run(scope: InterruptScope) -> None:
    """Interrupt this thread and run instructions, before one of which the exception arrives."""
    scope.interrupt()
    [abs(number) for number in range(1000)]


def test_raise_interrupt_in_other_thread_keeps_interrupt_of_user_thread() -> None:
    scope = InterruptScope()
    scope.begin()

    def other() -> None:
        with contextlib.suppress(AttemptInterrupted):
            scope.raise_interrupt("over")

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    with pytest.raises(AttemptInterrupted):
        interrupt_and_run(scope)
    scope.end()


def test_interrupt_while_starting_threads_raises_in_user_thread() -> None:
    for _ in range(100):
        scope, started, ended = InterruptScope(), threading.Event(), threading.Event()
        thread = threading.Thread(target=start_threads, args=(scope, started, ended), daemon=True)
        thread.start()
        started.wait()
        scope.interrupt()
        assert ended.wait(300)


def start_threads(scope: InterruptScope, started: threading.Event, ended: threading.Event) -> None:
    try:
        scope.begin()
        while True:
            threading.Thread(target=started.set).start()
    except AttemptInterrupted:
        ended.set()
