"""User code in a thread is interrupted while it runs, and never afterwards."""

from __future__ import annotations

import contextlib
import threading

import pytest

from drawbar.train._worker.interrupt import AttemptInterrupted, InterruptScope


def run(code: InterruptScope, started: threading.Event) -> None:
    code.begin()
    started.set()
    while True:
        pass


def test_it_is_interrupted_at_its_next_instruction() -> None:
    code, started, ended = InterruptScope(), threading.Event(), threading.Event()

    def user_code() -> None:
        try:
            run(code, started)
        except AttemptInterrupted:
            ended.set()

    threading.Thread(target=user_code, daemon=True).start()
    started.wait()
    code.interrupt()
    assert ended.wait(10)


def test_one_that_comes_before_it_begins_is_not_lost() -> None:
    code = InterruptScope()
    code.interrupt()
    with pytest.raises(AttemptInterrupted):
        code.begin()


def test_one_that_comes_too_late_hits_nothing() -> None:
    code = InterruptScope()
    code.begin()
    code.end()
    code.interrupt()
    assert [number for number in range(1000) if number < 0] == []


@pytest.mark.timeout(60)
def test_one_that_is_taken_back_leaves_a_traced_thread_running() -> None:
    """What is pending for ever keeps Python 3.11 from beginning any function that is traced."""
    for is_late in (False, True):
        code, ended = InterruptScope(), threading.Event()

        def user_code(code: InterruptScope, is_late: bool, ended: threading.Event) -> None:
            with contextlib.suppress(AttemptInterrupted):
                code.begin()
                if is_late:
                    code.interrupt()
                code.end()
            [abs(number) for number in range(1000)]
            ended.set()

        threading.setprofile(lambda *_: None)
        try:
            arguments = (code, is_late, ended)
            threading.Thread(target=user_code, args=arguments, daemon=True).start()
        finally:
            threading.setprofile(None)
        assert ended.wait(10)


@pytest.mark.parametrize("is_sent", [False, True])
def test_what_a_wait_has_raised_is_not_raised_again_while_the_code_cleans_up(is_sent: bool) -> None:
    code = InterruptScope()
    code.begin()
    if is_sent:
        with contextlib.suppress(AttemptInterrupted):
            go_on(code)
    with pytest.raises(AttemptInterrupted, match="over"):
        code.raise_interrupt("over")
    go_on(code)
    code.end()


def go_on(code: InterruptScope) -> None:
    """Run instructions after an interruption, which comes before one of them or never."""
    code.interrupt()
    [abs(number) for number in range(1000)]


def test_what_another_thread_raises_spares_the_code_nothing() -> None:
    code = InterruptScope()
    code.begin()

    def other() -> None:
        with contextlib.suppress(AttemptInterrupted):
            code.raise_interrupt("over")

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    with pytest.raises(AttemptInterrupted):
        go_on(code)
    code.end()


def test_a_thread_that_the_code_starts_is_not_hit_in_its_place() -> None:
    for _ in range(100):
        code, started, ended = InterruptScope(), threading.Event(), threading.Event()
        thread = threading.Thread(target=start_threads, args=(code, started, ended), daemon=True)
        thread.start()
        started.wait()
        code.interrupt()
        assert ended.wait(10)


def start_threads(code: InterruptScope, started: threading.Event, ended: threading.Event) -> None:
    try:
        code.begin()
        while True:
            threading.Thread(target=started.set).start()
    except AttemptInterrupted:
        ended.set()
