"""Check which process and thread may report for a rank.

A forked child (a DataLoader worker, multiprocessing) has a copy of the session, but its messages
are not received. Threads that an earlier attempt left behind must not report either. Because the
k-th reports and the k-th collectives of all ranks belong together, each rank of a group with
several workers must call them from one thread. Otherwise their order would be undefined.
"""

from __future__ import annotations

import os
import threading
from weakref import WeakSet

from drawbar.train._protocol.assignment import Ranks
from drawbar.train._worker import fork_counter


class ThreadGuard:
    """Checks the callers of `report()` and related functions, for one rank in one attempt."""

    def __init__(self, ranks: Ranks) -> None:
        self._rank = ranks.world_rank
        self._is_single_worker = ranks.world_size == 1
        self._pid = os.getpid()
        self._fork_count = fork_counter.count
        self._function_thread_id = threading.get_ident()
        self._foreign_threads = WeakSet[threading.Thread]()
        self._reporting_thread: threading.Thread | None = None

    def start(self) -> None:
        """Record the calling thread as the function's thread and all other threads as foreign."""
        self._function_thread_id = threading.get_ident()
        # Only at the start: threads that start later belong to the attempt.
        self._foreign_threads.update(threading.enumerate())
        self._foreign_threads.discard(threading.current_thread())

    def check_caller(self, function_name: str) -> None:
        """Check that this process and this thread belong to the attempt.

        Raises:
            RuntimeError: The process is a forked child, or the thread started before the attempt.
        """
        if fork_counter.count != self._fork_count:
            raise RuntimeError(
                f"{function_name}() was called in process {os.getpid()}, a fork of process "
                f"{self._pid} (rank {self._rank}), but only process {self._pid} can report. "
                "Return the values from the DataLoader worker or child process, and call "
                f"{function_name}() in process {self._pid}."
            )
        # The common case and the cheapest check: every report() runs this.
        if threading.get_ident() == self._function_thread_id:
            return
        if (thread := threading.current_thread()) in self._foreign_threads:
            raise RuntimeError(
                f"{function_name}() was called in thread {thread.name!r}, which started before "
                f"this attempt of rank {self._rank}. Start the thread in the training function, "
                "and end it there."
            )

    def reset_reporting_thread(self) -> None:
        """Allow another thread to report, before and after the training function runs."""
        self._reporting_thread = None

    def check_reporting_thread(self, function_name: str) -> None:
        """Check that no other thread reports for this rank. Must not be called concurrently.

        Raises:
            RuntimeError: There are several ranks, and another living thread has reported.
        """
        if self._is_single_worker:
            return
        thread, reporting_thread = threading.current_thread(), self._reporting_thread
        if (
            reporting_thread is not thread
            and reporting_thread is not None
            and reporting_thread.is_alive()
        ):
            raise RuntimeError(
                f"Thread {thread.name!r} of rank {self._rank} called {function_name}, but thread "
                f"{reporting_thread.name!r} has already called report() or a collective. With "
                "several workers, make all these calls in one thread. Send values from other "
                "threads to this thread, for example through a queue.Queue."
            )
        self._reporting_thread = thread
