"""Who may speak for a rank: its own process, and the threads of its own attempt.

A forked child (a DataLoader worker, multiprocessing) has a copy of everything, but nobody hears
what it says. A thread that an earlier attempt has left behind is as much a stranger. And since the
k-th reports of all ranks belong together, as their k-th collectives do, in a group of several
workers each rank speaks by one thread: between two, which call is the k-th would be chance.
"""

from __future__ import annotations

import os
import threading
from weakref import WeakSet

from drawbar.train._messages import Ranks
from drawbar.train._worker import fork_counter


class ThreadGuard:
    """Checks who calls `report()` and its companions, for one rank in one attempt."""

    def __init__(self, ranks: Ranks) -> None:
        self._rank = ranks.world_rank
        self._is_single_worker = ranks.world_size == 1
        self._pid = os.getpid()
        self._fork_count = fork_counter.count
        self._function_thread_id = threading.get_ident()
        self._foreign_threads = WeakSet[threading.Thread]()
        self._reporting_thread: threading.Thread | None = None

    def start(self) -> None:
        """Take the calling thread for the function's own; the others that live are strangers."""
        self._function_thread_id = threading.get_ident()
        # Looked up once, at the start: later ones are the attempt's own, whoever has started them.
        self._foreign_threads.update(threading.enumerate())
        self._foreign_threads.discard(threading.current_thread())

    def check_caller(self, function_name: str) -> None:
        """Check that this process and this thread belong to the attempt.

        Raises:
            RuntimeError: The process was forked, or the thread began before the attempt.
        """
        if fork_counter.count != self._fork_count:
            raise RuntimeError(
                f"{function_name}() was called in process {os.getpid()}, a fork of process "
                f"{self._pid}, "
                f"which is rank {self._rank}: nobody hears what a DataLoader worker "
                "or another child says. "
                f"Return it to process {self._pid}, and call {function_name}() there"
            )
        # The usual case, and the cheapest look: every report() comes through here.
        if threading.get_ident() == self._function_thread_id:
            return
        if (thread := threading.current_thread()) in self._foreign_threads:
            raise RuntimeError(
                f"{function_name}() was called in thread {thread.name!r}, which began before this "
                "attempt "
                f"of rank {self._rank} and is none of its own. Start such threads in the training "
                "function, and end them there"
            )

    def reset_reporting_thread(self) -> None:
        """Forget which thread has spoken, between a backend's set-up, the function and the end."""
        self._reporting_thread = None

    def check_reporting_thread(self, function_name: str) -> None:
        """Check that no other thread speaks for this rank. For one caller at a time.

        Raises:
            RuntimeError: There are several ranks, and another living thread has spoken.
        """
        if self._is_single_worker:
            return
        thread, speaker = threading.current_thread(), self._reporting_thread
        if speaker is not thread and speaker is not None and speaker.is_alive():
            raise RuntimeError(
                f"thread {thread.name!r} of rank {self._rank} called {function_name}, and thread "
                f"{speaker.name!r} has reported or met the other ranks before. The ranks' k-th "
                "calls belong together, and between threads their order is chance: with several "
                "workers, call report() and collectives from one thread, and hand it what the "
                "others have, such as by a queue.Queue"
            )
        self._reporting_thread = thread
