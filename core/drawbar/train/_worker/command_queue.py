"""Store commands until the threads that wait for them take them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import TypeVar

from drawbar._process.training_thread import InterruptScope
from drawbar.train._protocol.commands import (
    CheckpointListReply,
    CollectiveResult,
    Command,
    CommitCompleted,
    DiagnosisReply,
    FileChunkAck,
    FileReply,
    PersistFiles,
    RequestAgreed,
)
from drawbar.train._protocol.messages import Message

CommandKey = tuple[type[object], int]
"""Type of a command and the id of its request, collective, or report."""

Reply = (
    CheckpointListReply
    | DiagnosisReply
    | FileChunkAck
    | FileReply
    | CollectiveResult
    | RequestAgreed
)
"""Commands that reply to exactly one request of this rank."""

_ReplyT = TypeVar("_ReplyT", bound=Reply)


class CommandQueue:
    """Commands of one rank that no thread has taken yet.

    Args:
        send: Callback that sends messages to the controller.
        interrupt_scope: Raises the interrupt in threads that wait.
    """

    def __init__(self, send: Callable[[Message], None], interrupt_scope: InterruptScope) -> None:
        self.send = send
        self._interrupt_scope = interrupt_scope
        self._changed = threading.Condition()
        self._commands: dict[CommandKey, Command] = {}
        self._request_ids = itertools.count()  # shared by all threads
        self.interrupt_reason: str | None = None
        # Returns a function that the calling thread must run before it waits any longer.
        self.take_task: Callable[[], Callable[[], None] | None] = lambda: None

    def put(self, command: Reply | PersistFiles | CommitCompleted) -> None:
        """Add a command and wake the thread that waits for it. Can be called from any thread."""
        with self._changed:
            self._commands[get_command_key(command)] = command
            self._changed.notify_all()

    def interrupt(self, reason: str) -> None:
        """Interrupt all threads that wait now or later."""
        with self._changed:
            self.interrupt_reason = reason
            self._changed.notify_all()

    def raise_if_interrupted(self) -> None:
        """Raise an error if the attempt has been interrupted.

        Raises:
            AttemptInterrupted: The attempt has been interrupted.
        """
        if self.interrupt_reason is not None:
            self._interrupt_scope.raise_interrupt(self.interrupt_reason)

    def request(
        self,
        make_message: Callable[[int], Message],
        reply_type: type[_ReplyT],
        timeout: float | None = None,
        make_fallback: Callable[[int], Message] | None = None,
    ) -> _ReplyT:
        """Send a request and return its reply.

        Args:
            make_message: Makes the request from a new request id.
            reply_type: Type of the reply.
            timeout: Time limit in seconds. None waits without limit.
            make_fallback: Makes the message to send with the same request id after `timeout`; its
                reply is awaited without limit.

        Raises:
            AttemptInterrupted: The attempt has been interrupted.
            TimeoutError: There is no reply within `timeout`, and no fallback.
        """
        request_id = next(self._request_ids)
        self.send(make_message(request_id))
        try:
            reply = self.wait((reply_type, request_id), timeout=timeout)
        except TimeoutError:
            if make_fallback is None:
                raise
            self.send(make_fallback(request_id))
            reply = self.wait((reply_type, request_id))
        assert isinstance(reply, reply_type)
        return reply

    def wait(self, *keys: CommandKey, timeout: float | None = None) -> Command:
        """Wait for the first of several commands, and remove and return it.

        Raises:
            AttemptInterrupted: The attempt has been interrupted.
            TimeoutError: No command arrived within `timeout` seconds.
        """

        def take_command() -> Command | Callable[[], None] | None:
            # Return a command that has arrived even if the attempt is interrupted: a committed
            # checkpoint is not a failure.
            for key in keys:
                if key in self._commands:
                    return self._commands.pop(key)
            self.raise_if_interrupted()
            return self.take_task()

        while True:
            with self._changed:
                command = self._changed.wait_for(take_command, timeout)
            if command is None:
                raise TimeoutError(f"The controller did not reply within {timeout} s.")
            if not callable(command):
                return command
            command()

    def wait_until(self, is_done: Callable[[], bool], timeout: float | None) -> None:
        """Wait until a condition is true, which is checked after each command and `notify`.

        Raises:
            AttemptInterrupted: The attempt has been interrupted.
        """

        def is_done_or_interrupted() -> bool:
            self.raise_if_interrupted()
            return is_done()

        with self._changed:
            self._changed.wait_for(is_done_or_interrupted, timeout)

    def notify(self) -> None:
        """Let all threads check their conditions again."""
        with self._changed:
            self._changed.notify_all()


def get_command_key(command: Reply | PersistFiles | CommitCompleted) -> CommandKey:
    """Return the key by which a thread waits for a command."""
    match command:
        case CollectiveResult():
            return type(command), command.sequence
        case PersistFiles() | CommitCompleted():
            return type(command), command.report_index
        case _:
            return type(command), command.request_id
