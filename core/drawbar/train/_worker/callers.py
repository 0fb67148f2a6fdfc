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
from drawbar.train._worker import forks


class Callers:
    """Checks who calls `report()` and its companions, for one rank in one attempt."""

    def __init__(self, ranks: Ranks) -> None:
        self._rank = ranks.world_rank
        self._is_alone = ranks.world_size == 1
        self._pid = os.getpid()
        self._forks = forks.count
        self._own = threading.get_ident()
        self._strangers = WeakSet[threading.Thread]()
        self._speaker: threading.Thread | None = None

    def begin(self) -> None:
        """Take the calling thread for the function's own; the others that live are strangers."""
        self._own = threading.get_ident()
        # Looked up once, at the start: later ones are the attempt's own, whoever has started them.
        self._strangers.update(threading.enumerate())
        self._strangers.discard(threading.current_thread())

    def check(self, caller: str) -> None:
        """Check that this process and this thread belong to the attempt.

        Raises:
            RuntimeError: The process was forked, or the thread began before the attempt.
        """
        if forks.count != self._forks:
            raise RuntimeError(
                f"{caller}() was called in process {os.getpid()}, a fork of process {self._pid}, "
                f"which is rank {self._rank}: nobody hears what a DataLoader worker "
                "or another child says. "
                f"Return it to process {self._pid}, and call {caller}() there"
            )
        # The usual case, and the cheapest look: every report() comes through here.
        if threading.get_ident() == self._own:
            return
        if (thread := threading.current_thread()) in self._strangers:
            raise RuntimeError(
                f"{caller}() was called in thread {thread.name!r}, which began before this attempt "
                f"of rank {self._rank} and is none of its own. Start such threads in the training "
                "function, and end them there"
            )

    def let_any_thread_speak(self) -> None:
        """Forget which thread has spoken, between a backend's set-up, the function and the end."""
        self._speaker = None

    def check_speaker(self, call: str) -> None:
        """Check that no other thread speaks for this rank. For one caller at a time.

        Raises:
            RuntimeError: There are several ranks, and another living thread has spoken.
        """
        if self._is_alone:
            return
        thread, speaker = threading.current_thread(), self._speaker
        if speaker is not thread and speaker is not None and speaker.is_alive():
            raise RuntimeError(
                f"thread {thread.name!r} of rank {self._rank} called {call}, and thread "
                f"{speaker.name!r} has reported or met the other ranks before. The ranks' k-th "
                "calls belong together, and between threads their order is chance: with several "
                "workers, call report() and collectives from one thread, and hand it what the "
                "others have, such as by a queue.Queue"
            )
        self._speaker = thread
