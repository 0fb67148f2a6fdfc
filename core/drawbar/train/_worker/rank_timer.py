"""Measure where the time of a rank goes: waiting for data, checkpoints, collectives, and phases."""

from __future__ import annotations

import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import msgspec

from drawbar._process.batch_counter import start_counter
from drawbar.train._protocol.messages import Observation

T = TypeVar("T")

PHASE_PREFIX = "phase:"
"""Prefix of the keys of phases that the user marks."""

MAX_PHASES = 100
"""Maximum number of names of phases per rank and attempt. Others are counted together."""

OTHER_PHASES = f"{PHASE_PREFIX}other phases"

MAX_INTERVAL_S = 10.0
"""Maximum time between two messages with times, if the rank reports meanwhile."""

_MEDIAN_STEPS = 101

_logger = logging.getLogger("drawbar.train")


class RankTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Times of a rank since the start of its training function, by part.

    Attributes:
        steps: Number of steps.
        seconds: Seconds by key: "function" is the time since the start, and "warmup" the excess of
            the first step. "data_wait", "checkpoint_save", "checkpoint_blocked", "collective", and
            "phase:NAME" do not overlap. "forward" is a part of the remaining time.
    """

    steps: int
    seconds: dict[str, float]


class RankTimer:
    """Times and counts of one rank since the start of its training function.

    Only the thread of the training function is measured: waiting in other threads does not delay
    the training. Measurements may be nested. Each second counts only for the innermost one.

    Args:
        clock: Returns the time in seconds. It never goes back.

    Attributes:
        batches: One number: the batches since the last report, including the one that is being
            loaded. Without a data loader that Drawbar tracks, the steps that the user has counted.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.start()

    def start(self, at: float | None = None) -> None:
        """Start in the calling thread, which runs the training function.

        Args:
            at: Time of the start, of another process of this machine. Default: now.
        """
        self._thread = threading.get_ident()
        self.start_time = self._last_step = self._since = self._clock() if at is None else at
        self._open: list[str] = []  # keys of the measurements in progress, the innermost last
        self._seconds: dict[str, float] = {}
        self._measured = self._measured_at_step = 0.0  # sum of the measurements
        self._forward = 0.0
        self.batches = start_counter()
        self._counts_steps = self._counts_batches = False
        self.num_steps = 0
        self._first_step = 0.0
        self._step_times: list[float] = []  # without the first one
        self._num_phases = 0
        self._interval, self._next_send = 1.0, self.start_time + 1.0

    # -- measurements

    @property
    def is_saving(self) -> bool:
        """True while the function saves or reports a checkpoint. Can be read in any thread."""
        return "checkpoint_save" in self._open or "checkpoint_blocked" in self._open

    @contextmanager
    def measure(self, key: str) -> Iterator[None]:
        """Measure the `with` block under this key."""
        self.begin(key)
        try:
            yield
        finally:
            self.end(key)

    def measure_items(self, key: str, items: Iterable[T]) -> Iterator[T]:
        """Yield the items, and measure the time that waiting for each of them takes."""
        iterator = iter(items)
        self._counts_batches = True
        while True:
            self.batches[0] += 1  # before it is loaded, which may fail
            self.begin(key)
            try:
                item = next(iterator)
            except StopIteration:
                self.batches[0] -= 1
                return
            finally:
                self.end(key)
            yield item

    def begin(self, key: str) -> None:
        """Begin to measure under a key, instead of the measurement in progress."""
        if threading.get_ident() == self._thread:
            self._charge(self._clock())
            self._open.append(key)

    def end(self, key: str) -> None:
        """End the innermost measurement with this key. It may already have ended."""
        if threading.get_ident() != self._thread or key not in self._open:
            return
        self._charge(self._clock())
        # Not always the last one: a generator may leave a measurement open while it is suspended.
        del self._open[len(self._open) - 1 - self._open[::-1].index(key)]

    def add_forward(self, seconds: float) -> None:
        """Add the duration of a forward pass, which is a part of the time of a step."""
        self._forward += seconds

    def _charge(self, now: float) -> None:
        """Add the time since the last change to the innermost measurement."""
        if self._open:
            seconds = now - self._since
            self._seconds[self._open[-1]] = self._seconds.get(self._open[-1], 0.0) + seconds
            self._measured += seconds
        self._since = now

    def make_phase_key(self, name: str) -> str:
        """Return the key under which a phase of the user is measured."""
        key = PHASE_PREFIX + name
        if key in self._seconds:
            return key
        if self._num_phases == MAX_PHASES:
            _logger.warning(
                "phase(%r) is phase number %d. It and all further names are counted as %r. Pass "
                "names from a fixed set, without the step or the epoch.",
                name,
                MAX_PHASES + 1,
                OTHER_PHASES.removeprefix(PHASE_PREFIX),
            )
        self._num_phases += 1
        if self._num_phases > MAX_PHASES:
            return OTHER_PHASES
        self._seconds[key] = 0.0
        return key

    # -- steps

    def on_step(self) -> None:
        """Count a step of the user. From now on, reports are not counted as steps."""
        if not self._counts_steps:
            self._counts_steps, self.num_steps = True, 0
            self._step_times.clear()
        if not self._counts_batches:
            self.batches[0] += 1
        self._add_step(self._clock())

    def on_report(self) -> Observation | None:
        """Count a report as a step, unless the user counts the steps.

        Returns:
            The times of the rank, if they have not been sent for a while.
        """
        now = self._clock()
        self.batches[0] = 0
        if not self._counts_steps:
            self._add_step(now)
        if now < self._next_send:
            return None
        # The first ones are sent early, so that short runs have some, too.
        self._interval = min(2 * self._interval, MAX_INTERVAL_S)
        self._next_send = now + self._interval
        return self.observe()

    def _add_step(self, now: float) -> None:
        self.num_steps += 1
        if self.num_steps > _MEDIAN_STEPS:
            return  # the first steps are enough for the excess of the first one
        if self._open and threading.get_ident() == self._thread:
            self._charge(now)
        seconds = max(now - self._last_step - (self._measured - self._measured_at_step), 0.0)
        self._last_step, self._measured_at_step = now, self._measured
        if self.num_steps == 1:
            self._first_step = seconds
        else:
            self._step_times.append(seconds)

    def observe(self) -> Observation:
        """Return a message with the times since the start of the training function."""
        return Observation(kind="rank_times", payload=msgspec.to_builtins(self.get_times()))

    def get_times(self) -> RankTimes:
        """Return the times since the start of the training function."""
        now = self._clock()
        if threading.get_ident() == self._thread:
            self._charge(now)
        warmup = 0.0
        if self._step_times:
            warmup = max(self._first_step - statistics.median(self._step_times), 0.0)
        seconds = {"function": now - self.start_time, "warmup": warmup, **self._seconds}
        if self._forward:
            seconds["forward"] = self._forward
        return RankTimes(
            steps=self.num_steps,
            seconds={key: round(value, 6) for key, value in seconds.items()},
        )
