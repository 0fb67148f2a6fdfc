"""RunHandle: observe, stop, and wait for a run."""

from __future__ import annotations

import contextlib
import math
import sys
import time
from datetime import timedelta
from functools import partial

from drawbar._base.fields import parse_duration
from drawbar._base.frames import without_internal_frames
from drawbar._base.metrics import Metrics
from drawbar._handle.driver_signals import diagnose_on_signal, stop_on_signals
from drawbar._handle.exit_codes import use_exit_code
from drawbar._handle.result import Result
from drawbar._handle.run_view import RunView
from drawbar._handle.user_abort import make_user_abort
from drawbar._observe.goodput import Goodput
from drawbar._observe.run_goodput import LiveGoodput
from drawbar._process.errors import UserAbort
from drawbar._records.run_progress import RunProgress
from drawbar._records.timeline import Timeline
from drawbar._storage.run_directory import describe_resume
from drawbar.train._driver.controller_thread import FunctionInterrupted
from drawbar.train._worker.active_session import can_save_on_request

# A Ctrl-C that arrives just before Python blocks is handled only when the wait ends.
JOIN_INTERVAL_S = 1.0


class RunHandle:
    """Handle to a run: wait for it, stop it, and inspect it.

    `DataParallelTrainer.start` and `attach` return handles. Methods and properties that query a
    detached run raise `TimeoutError` if the actor that controls it does not reply for 10 s.

    Args:
        run: View of the run. Drawbar passes it.

    Example:
        ```python
        run = trainer.start()
        print(run.status, run.metrics)
        run.stop()
        result = run.wait()
        ```
    """

    def __init__(self, run: RunView) -> None:
        self._run = run
        self._goodput: LiveGoodput | None = None

    @property
    def name(self) -> str:
        """Name of the run."""
        return self._run.directory.name

    @property
    def path(self) -> str:
        """Run directory, as a path or URI."""
        return self._run.directory.uri

    @property
    def status(self) -> str:
        """Status: "starting", "running", "restarting", "finished", "failed", or "stopped"."""
        return self._run.get_state().status

    @property
    def is_done(self) -> bool:
        """True if the run has ended, so that `wait` returns or raises at once."""
        return self._run.join(0)

    @property
    def metrics(self) -> Metrics | None:
        """Latest metrics of the lowest rank that has reported, usually rank 0."""
        metrics = self.metrics_by_rank
        return metrics[min(metrics)] if metrics else None

    @property
    def metrics_by_rank(self) -> dict[int, Metrics]:
        """Latest metrics of each rank."""
        return self._run.get_state().last_metrics

    @property
    def progress(self) -> RunProgress | None:
        """Latest progress of rank 0, with percent and ETA; None if it was never set.

        Example:
            ```python
            if run.progress is not None:
                print(run.progress.percent, run.progress.eta_seconds)
            ```
        """
        return self._run.get_state().progress

    @property
    def stalled_ranks(self) -> dict[int, str]:
        """Ranks that show no activity while others wait or continue, with their locations.

        `FailureConfig.stall_warning_after` sets the time after which a rank counts as stalled.
        """
        return self._run.get_state().stalled_ranks

    @property
    def timeline(self) -> Timeline:
        """Start-up time, checkpoint time, and outcome of every attempt so far."""
        return self._run.get_state().timeline

    def goodput(self) -> Goodput:
        """Return which share of the time so far was productive, and where the rest went.

        Each call reads only the events after the previous call.

        Returns:
            The goodput. After the end of the run, it is equal to `Result.goodput`.

        Example: `print(run.goodput())`
        """
        if self._goodput is None:
            self._goodput = LiveGoodput(self._run.directory)
        return self._goodput.read(is_active=not self.is_done)

    def get_logs(self, rank: int = 0) -> str:
        """Return the output that a rank has written so far, in all attempts.

        With node-local storage, the log is available after the attempt of the rank has ended.

        Args:
            rank: World rank.

        Returns:
            The log, or an empty string if the rank has not started.

        Raises:
            ValueError: The run has no rank of this number.

        Example: `print(run.get_logs(rank=1))`
        """
        world_size = max((each.world_size for each in self.timeline.attempts), default=0)
        if rank < 0 or 0 < world_size <= rank:
            raise ValueError(f"rank must be >= 0 and < {world_size or 'num_workers'}, found {rank}")
        return (self._run.read_log(rank) or b"").decode(errors="replace")

    def diagnose(self) -> str:
        """Write the stacks of all ranks to `<run>/stacks` and summarize where the ranks are.

        Returns:
            A few lines that name the location of each rank.

        Raises:
            RuntimeError: The run has ended.

        Example: `print(run.diagnose())`
        """
        if self.is_done:
            raise RuntimeError(
                f"run {self.name!r} has ended ({self.status}): it has no workers to inspect"
            )
        return self._run.diagnose()

    def stop(self, *, save: bool = True) -> None:
        """Request the run to stop. It can be resumed with `resume="auto"`.

        Returns at once; `wait` returns when the run has ended.

        Args:
            save: If True, `should_checkpoint()` returns True in the training functions, and the run
                ends after its next commit, or at once if no function is running. It also ends if
                ranks that have called `should_checkpoint()` do nothing for a minute. If False, the
                functions are interrupted now, and progress since the last checkpoint is lost.

        Example:
            ```python
            run.stop(save=True)
            result = run.wait()
            ```
        """
        self._run.stop(save=save)

    def wait(self, timeout: float | timedelta | None = None) -> Result:
        """Wait until the run has ended. A run that was stopped has a result too.

        Ctrl-C stops the run, a second Ctrl-C kills it. A detached run continues after Ctrl-C. With
        `num_workers=0`, the first Ctrl-C interrupts the function, unless it calls
        `should_checkpoint()`.

        Args:
            timeout: Seconds, or a timedelta. None waits without limit.

        Returns:
            The result of the run.

        Raises:
            TypeError: `timeout` is not a duration.
            ValueError: `timeout` is negative or not a number.
            TimeoutError: The run has not ended within `timeout`. It continues.
            TrainingFailedError: The run failed. The subclass and the message describe the cause.
            UserAbort: The user pressed Ctrl-C.

        Example:
            ```python
            result = run.wait(timeout=3600)
            ```
        """
        try:
            return self._wait(timeout)
        except (Exception, UserAbort) as error:
            raise without_internal_frames(use_exit_code(error))  # noqa: B904  # the same error

    def _wait(self, timeout: float | timedelta | None) -> Result:
        seconds = math.inf
        if timeout is not None:
            seconds = parse_duration(
                "timeout", timeout, none_meaning="waits without limit", can_be_zero=True
            )
        deadline = time.monotonic() + seconds
        interrupts = handled = 0
        has_ended_function = is_late = False
        run = self._run
        with (
            diagnose_on_signal(run.diagnose),
            stop_on_signals(
                partial(run.stop, save=None),
                self._stop_after_ctrl_c,
                can_save_on_request,
                self._wait_until_ended,
                is_detached=run.is_detached,
            ) as has_signal,
        ):
            while True:
                try:
                    # Inside `try`: a second Ctrl-C may arrive while the first is handled.
                    if handled < interrupts:
                        handled = interrupts
                        if interrupts == 1:
                            self._stop_after_ctrl_c(has_ended_function=has_ended_function)
                        else:
                            run.kill()
                    remaining = max(0.0, deadline - time.monotonic())
                    if has_signal():
                        remaining = JOIN_INTERVAL_S
                    # Wait in short intervals: a Ctrl-C just before a wait does not interrupt it.
                    if self._run.join(min(remaining, JOIN_INTERVAL_S)):
                        break
                    # The timeout does not apply while the run is being stopped.
                    if time.monotonic() >= deadline and not has_signal():
                        is_late = True
                        break
                except KeyboardInterrupt as error:
                    if self._run.is_detached:
                        raise make_user_abort(self._describe_detach()) from None
                    deadline, interrupts = math.inf, interrupts + 1
                    has_ended_function |= isinstance(error, FunctionInterrupted)
        if interrupts or has_signal():
            raise make_user_abort(
                f"stopped by Ctrl-C; the run is in {self.path}. "
                + describe_resume(self._run.directory)
            )
        if is_late:
            raise TimeoutError(self._describe_timeout(seconds))
        return self._run.get_outcome().get_result()

    def _wait_until_ended(self) -> None:
        while not self._run.join(JOIN_INTERVAL_S):
            pass

    def _stop_after_ctrl_c(self, *, has_ended_function: bool = False) -> None:
        # A function that Ctrl-C has ended cannot save, and other ranks cannot save without it.
        self._run.stop(save=False if has_ended_function else None)
        plan = (
            "It has interrupted the training function. Drawbar"
            if has_ended_function
            else "Drawbar saves a checkpoint if the training functions call should_checkpoint(), "
            "as integrations do. It then interrupts them and"
        )
        with contextlib.suppress(OSError):  # the terminal is closed
            print(
                f"Ctrl-C: stopping run {self.name!r}. {plan} completes commits. "
                "Press Ctrl-C again to stop at once.",
                file=sys.stderr,
                flush=True,
            )

    def _describe_timeout(self, seconds: float) -> str:
        description = f"after {seconds:g} s run {self.name!r} in {self.path} has not ended"
        return f"{description}; {self._run.unresponsive_reason or 'it continues'}"

    def _describe_detach(self) -> str:
        return (
            f"Ctrl-C: no longer waiting for the detached run {self.name!r}, which continues. "
            f"To stop it, call drawbar.train.attach({self.name!r}).stop()"
        )

    def __repr__(self) -> str:
        try:
            state = self._run.get_state()
        except TimeoutError:
            return f"RunHandle({self.name!r}, host does not reply, path={self.path!r})"
        parts = [repr(self.name), state.status]
        if state.status == "running":
            parts.append(f"world size {state.num_workers}")
        if state.stalled_ranks:
            parts.append(f"stalled ranks {', '.join(map(str, sorted(state.stalled_ranks)))}")
        if state.last_metrics:
            parts.append(f"metrics={state.last_metrics[min(state.last_metrics)]!r}")
        return f"RunHandle({', '.join(parts)}, path={self.path!r})"
