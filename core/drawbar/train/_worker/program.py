"""A program in the place of the training function: a Python process of the rank's own.

The rank's process starts it, hears it, and ends with its end. What a script may do that no function
in a thread can, it does there: it has the main thread, takes signals, forks and spawns, leaves exit
handlers, dies. The rank's process stays, and so do its place and its GPUs when the program is
started anew.
"""

from __future__ import annotations

import contextlib
import os
import queue
import selectors
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import partial
from typing import IO, Literal

import msgspec

from drawbar.train._errors import ProgramFailedError
from drawbar.train._messages import SignOfLife, Wrote
from drawbar.train._orders import Interrupt, Order
from drawbar.train._worker import program_main, sentinel
from drawbar.train._worker.context import current_session
from drawbar.train._worker.interrupt import AttemptInterrupted
from drawbar.train._worker.output import write_to_log
from drawbar.train._worker.program_session import RanksEnd
from drawbar.train._worker.program_signs import Signs
from drawbar.train._worker.session import Session
from drawbar.train._worker.stack import Frame, Stack, detect_stopped_process
from drawbar.train._worker.user_frames import format_user_location

MARKER_VARIABLE = "DRAWBAR_PROGRAM"
SIGN_SECONDS = 5.0
_STACK_SECONDS = 1.0
_END_SECONDS = 30.0  # torchrun's; the controller is less patient
_DRAIN_SECONDS = 1.0
_READ_BYTES = 1 << 16


class Account(msgspec.Struct, frozen=True):
    """Failure of a script, as `program_main` describes it.

    `is_exit` is true for SystemExit and KeyboardInterrupt.
    """

    type_name: str
    message: str
    traceback: str
    lines: list[tuple[str, int, str]]
    time: float
    is_exit: bool


class Lines(msgspec.Struct, frozen=True):
    """Where a program stands: its main thread's lines, and the text of all threads' stacks."""

    lines: list[tuple[str, int, str]]
    text: str


class Told(msgspec.Struct, frozen=True):
    """What a program tells: one of the two."""

    failed: Account | None = None
    stack: Lines | None = None


def run_program(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    *,
    sign_seconds: float = SIGN_SECONDS,
) -> None:
    """Run a Python script instead of a training function, and wait for its end.

    The script may call `drawbar.train.report` and related functions, which then act for this rank.
    The driver prints the standard output and standard error of rank 0, byte for byte. The log of
    each rank has its complete output. When the attempt ends, the script receives SIGTERM, or
    SIGINT if the user stops the run. Processes that it leaves behind are killed.

    Args:
        arguments: What would follow `python`: a script and its arguments, or "-m", a module and its
            arguments.
        environment: All variables of its process.
        sign_seconds: How often it is looked whether the program and its children write or compute,
            which counts as a sign of life.

    Raises:
        ProgramFailedError: It has failed.
        OSError: It cannot be started.
    """
    session = current_session("run_program")
    program = session.program = Program(session, sign_seconds)
    try:
        program.start(arguments, environment)
        program.wait()
    except AttemptInterrupted:
        if not program.has_failed:
            program.end()
            raise
        program.await_end()
    finally:
        session.program = None
        program.close()
    program.check()


class Program:
    """A program that runs. `obey` and `stack` are called from other threads than the rest."""

    def __init__(self, session: Session, sign_seconds: float) -> None:
        self._session = session
        self._sign_seconds = sign_seconds
        self._next_sign = time.monotonic() + sign_seconds
        self._marker = f"{os.getpid()}-{os.urandom(8).hex()}"
        self._process: subprocess.Popen[bytes] | None = None
        self._control, self._programs_control = socket.socketpair()
        self._said, self._programs_said = socket.socketpair()
        self._wire = RanksEnd(session, self._said.detach())
        self._woken, self._wake = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._ended_at: float | None = None
        self._is_stopped_by_user = False
        self._account: Account | None = None
        self._unread = bytearray()
        self._stacks: queue.SimpleQueue[Stack] = queue.SimpleQueue()

    def start(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        """Start its process."""
        rank = self._session.assignment.ranks.world_rank
        with self._programs_control as control, self._programs_said as said:
            descriptors = (control.fileno(), said.fileno())
            self._process = process = subprocess.Popen(
                [sys.executable, program_main.__file__, *map(str, descriptors), *arguments],
                env={**environment, MARKER_VARIABLE: self._marker},
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                # The streams of the other ranks are inherited, and lead to the log.
                stdout=subprocess.PIPE if rank == 0 else None,
                stderr=subprocess.PIPE if rank == 0 else None,
                # As torchrun does: Linux shares the cores out among sessions (sched_autogroup), and
                # in Ray's all ranks and all of Ray's processes would have one share.
                start_new_session=True,
            )
        self._ooms = sentinel.OomKillCounter(process.pid)
        self._signs = Signs(process.pid, self._session.directory.get_log_path(rank))
        self._listen_to(process)
        threading.Thread(
            target=self._await_end, args=(process.pid,), name="drawbar-program", daemon=True
        ).start()

    def _listen_to(self, process: subprocess.Popen[bytes]) -> None:
        register = partial(self._selector.register, events=selectors.EVENT_READ)
        register(self._woken, data=self._take_wake)
        register(self._control, data=self._take_control)
        register(self._wire, data=self._wire.hear)
        if process.stdout is not None and process.stderr is not None:
            register(process.stdout, data=partial(self._pass_output, process.stdout, "stdout"))
            register(process.stderr, data=partial(self._pass_output, process.stderr, "stderr"))

    # -- from other threads

    def _await_end(self, pid: int) -> None:
        # It is not reaped yet, so that nobody else can get its pid, or lead its group.
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
        self._ended_at = time.time()
        self._wake_up()

    def _wake_up(self) -> None:
        with contextlib.suppress(OSError):  # closed: all is over
            self._wake.send(b".")

    def obey(self, order: Order) -> None:
        """Take an order for the program. An interruption hits the thread that waits for it."""
        if isinstance(order, Interrupt):
            self._is_stopped_by_user = order.by_user
            self._wake_up()
        else:
            self._wire.obey(order)

    def capture_stack(self) -> Stack:
        """Say where the program stands, or that it is stopped.

        Raises:
            TimeoutError: It does not answer.
        """
        assert self._process is not None  # it is asked where it stands
        while not self._stacks.empty():
            self._stacks.get()  # an answer that came too late
        self._control.sendall(b"stack\n")
        try:
            return self._stacks.get(timeout=_STACK_SECONDS)
        except queue.Empty:
            stopped = detect_stopped_process(self._process.pid)
            if stopped is None:
                raise TimeoutError(f"{self._process} does not answer") from None
            return stopped

    # -- in the thread that waits

    def wait(self) -> None:
        """Wait for its end."""
        while self._ended_at is None:
            self._listen(self._sign_seconds)

    def _listen(self, seconds: float) -> bool:
        """Take what the program says; tells whether it has said something."""
        ready = self._selector.select(seconds)
        for key, _ in ready:
            if not key.data():
                self._selector.unregister(key.fileobj)
        # By the clock and not by `ready`: a program that writes without end still needs its sign.
        if time.monotonic() >= self._next_sign:
            self._next_sign = time.monotonic() + self._sign_seconds
            if self._signs.look():
                self._session.forward(SignOfLife())
        return bool(ready)

    def _take_wake(self) -> bool:
        self._woken.recv(64)
        return True

    def _take_control(self) -> bool:
        data = self._control.recv(_READ_BYTES)
        self._unread += data
        if b"\n" not in data:
            return bool(data)
        *lines, self._unread = self._unread.split(b"\n")
        for line in lines:
            told = msgspec.json.decode(line, type=Told)
            self._account = told.failed or self._account
            if told.stack is not None:
                frames = tuple(Frame(*each) for each in told.stack.lines)
                self._stacks.put(Stack(frames=frames, text=told.stack.text))
        return bool(data)

    def _pass_output(self, pipe: IO[bytes], stream: Literal["stdout", "stderr"]) -> bool:
        data = os.read(pipe.fileno(), _READ_BYTES)
        if data:
            write_to_log(data)
            self._session.forward(Wrote(data=data, stream=stream))
        return bool(data)

    @property
    def has_failed(self) -> bool:
        """Whether it has failed by itself, as far as is known yet."""
        return self._account is not None or self._ended_at is not None

    def end(self) -> None:
        """Have it end: as by Ctrl-C where the user stops the run, and wait for that."""
        if self._process is None:
            return
        self._process.send_signal(signal.SIGINT if self._is_stopped_by_user else signal.SIGTERM)
        self.await_end()

    def await_end(self) -> None:
        """Wait for its end while exit handlers run, as long as is reasonable."""
        deadline = time.monotonic() + _END_SECONDS
        while self._ended_at is None and (left := deadline - time.monotonic()) > 0:
            self._listen(left)

    def close(self) -> None:
        """Kill it if it still runs, and whatever processes it has left; take its last words."""
        process = self._process
        if process is not None:
            # The group first, while its leader is not reaped: afterwards the number may be
            # another's.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        sentinel.kill_orphans(f"{MARKER_VARIABLE}={self._marker}")
        if process is not None:
            self._take_last_words(process)
        self._selector.close()
        self._wire.close()
        for end in (self._control, self._wake, self._woken):
            end.close()

    def _take_last_words(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + _DRAIN_SECONDS
        while self._listen(0) and time.monotonic() < deadline:
            pass
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()

    def check(self) -> None:
        """Find out how it has ended.

        Raises:
            ProgramFailedError: It has failed.
        """
        assert self._process is not None  # it has been started
        status, account = self._process.returncode, self._account
        if status == 0:
            return
        at = self._ended_at or time.time()
        if account is not None:
            where, code = format_user_location(account.lines), status if status > 0 else 1
            raise ProgramFailedError(
                account.message,
                account.type_name,
                code,
                account.time,
                account.traceback,
                where,
                account.is_exit,
            )
        if status < 0:
            # As a shell counts: 128 and the number of the signal.
            raise ProgramFailedError(self._how_killed(-status), "program died", 128 - status, at)
        raise ProgramFailedError(
            f"exited with code {status} by os._exit", "program ended", status, at
        )

    def _how_killed(self, number: int) -> str:
        known = number in set(signal.Signals)
        told = f"killed by {signal.Signals(number).name if known else f'signal {number}'}"
        if number == signal.SIGKILL and self._ooms.has_increased():
            return f"{told}, by the kernel's OOM killer: the cgroup's oom_kill count rose"
        return told
