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
from drawbar.train._storage.node_local_storage import FileReply
from drawbar.train._worker.interrupt import InterruptScope

CommandKey = tuple[type[object], int]
"""A kind of order, and its number: of the question, the collective or the checkpoint."""

Reply = CheckpointsAnswer | Diagnosis | FileTaken | FileReply | CollectiveDone
"""What comes once for each time that a rank asks for it."""

_ReplyT = TypeVar("_ReplyT", bound=Reply)


class CommandQueue:
    """Keeps orders until the threads that wait for them take them."""

    def __init__(self, say: Callable[[Message], None], interrupt_scope: InterruptScope) -> None:
        self._say = say
        self._user_code = interrupt_scope
        self._changed = threading.Condition()
        self._orders: dict[CommandKey, Order] = {}
        self._request_ids = itertools.count()  # of questions, of any thread
        self.interrupt_reason: str | None = None

    def put(self, order: Reply | Persist | Committed) -> None:
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
            self.interrupt_reason = reason
            self._changed.notify_all()

    def raise_if_interrupted(self) -> None:
        """Go on if the attempt does.

        Raises:
            AttemptInterrupted: It is over.
        """
        if self.interrupt_reason is not None:
            self._user_code.raise_interrupt(self.interrupt_reason)

    def request(
        self,
        make_message: Callable[[int], Message],
        reply_type: type[_ReplyT],
        timeout: float | None = None,
        make_fallback: Callable[[int], Message] | None = None,
    ) -> _ReplyT:
        """Say a question under a number of its own, and wait for the answer.

        If that does not come within `timeout` seconds, `otherwise` is said under the same number.
        """
        number = next(self._request_ids)
        self._say(make_message(number))
        try:
            answer = self.wait((reply_type, number), timeout=timeout)
        except TimeoutError:
            if make_fallback is None:
                raise
            self._say(make_fallback(number))
            answer = self.wait((reply_type, number))
        assert isinstance(answer, reply_type)
        return answer

    def wait(self, *keys: CommandKey, timeout: float | None = None) -> Order:
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
            self.raise_if_interrupted()
            return None

        with self._changed:
            order = self._changed.wait_for(arrived, timeout)
        if order is None:
            raise TimeoutError(f"the controller gave no answer within {timeout} s")
        return order
