"""Calls that may block for as long as they like, without the event loop or the run's end."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar, TypeVarTuple

T = TypeVar("T")
Arguments = TypeVarTuple("Arguments")


async def in_daemon_thread(function: Callable[[*Arguments], T], *arguments: *Arguments) -> T:
    """Await what a function gives that runs in a thread of its own.

    If this is cancelled, the function goes on, and nobody waits for it: neither the loop's end nor
    Python's, which both wait for `asyncio.to_thread`.
    """
    loop = asyncio.get_running_loop()
    ended = asyncio.Event()
    outcome: Future[T] = Future()

    def call() -> None:
        try:
            outcome.set_result(function(*arguments))
        except BaseException as error:
            outcome.set_exception(error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=call, name="drawbar-call", daemon=True).start()
    await ended.wait()
    return outcome.result()
