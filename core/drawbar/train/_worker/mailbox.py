"""What the controller has ordered and nobody of this rank has taken yet."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TypeVar

from drawbar.train._messages import Message
from drawbar.train._orders import (
    CheckpointsAnswer,
    CollectiveDone,
    Committed,
    Diagnosis,
    FileTaken,
    Order,
    Persist,
)
from drawbar.train._storage.unshared_node import FileAnswer
from drawbar.train._worker.interrupt import Interruptible

Key = tuple[type[object], int]
"""A kind of order, and its number: of the question, the collective or the checkpoint."""

Expected = CheckpointsAnswer | Diagnosis | FileTaken | FileAnswer | CollectiveDone
"""What comes once for each time that a rank asks for it."""

_Answer = TypeVar("_Answer", bound=Expected)


class Mailbox:
    """Keeps orders until the threads that wait for them take them."""

    def __init__(self, say: Callable[[Message], None], user_code: Interruptible) -> None:
        self._say = say
        self._user_code = user_code
        self._changed = threading.Condition()
        self._orders: dict[Key, Order] = {}
        self._numbers = itertools.count()  # of questions, of any thread
        self.interrupted: str | None = None

    def put(self, order: Expected | Persist | Committed) -> None:
        """Keep an order, from any thread; wakes who waits for it."""
        match order:
            case CollectiveDone():
                number = order.sequence
            case Persist() | Committed():
                number = order.index
            case _:
                number = order.number
        with self._changed:
            self._orders[type(order), number] = order
            self._changed.notify_all()

    def interrupt(self, reason: str) -> None:
        """Let nobody wait any more: who does, or comes to, is interrupted."""
        with self._changed:
            self.interrupted = reason
            self._changed.notify_all()

    def check(self) -> None:
        """Go on if the attempt does.

        Raises:
            AttemptInterrupted: It is over.
        """
        if self.interrupted is not None:
            self._user_code.raise_here(self.interrupted)

    def ask(
        self,
        question: Callable[[int], Message],
        kind: type[_Answer],
        timeout: float | None = None,
        otherwise: Callable[[int], Message] | None = None,
    ) -> _Answer:
        """Say a question under a number of its own, and wait for the answer.

        If that does not come within `timeout` seconds, `otherwise` is said under the same number.
        """
        number = next(self._numbers)
        self._say(question(number))
        try:
            answer = self.wait((kind, number), timeout=timeout)
        except TimeoutError:
            if otherwise is None:
                raise
            self._say(otherwise(number))
            answer = self.wait((kind, number))
        assert isinstance(answer, kind)
        return answer

    def wait(self, *keys: Key, timeout: float | None = None) -> Order:
        """Wait for the first of some orders, and take it.

        Raises:
            AttemptInterrupted: The attempt is over.
            TimeoutError: None has come within `timeout` seconds.
        """

        def arrived() -> Order | None:
            # What has arrived is taken even if the attempt is over: a checkpoint that is committed
            # is no failure.
            for key in keys:
                if key in self._orders:
                    return self._orders.pop(key)
            self.check()
            return None

        with self._changed:
            order = self._changed.wait_for(arrived, timeout)
        if order is None:
            raise TimeoutError(f"the controller gave no answer within {timeout} s")
        return order
