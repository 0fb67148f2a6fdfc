"""`Tracker`: base class of the callbacks that send reports to an experiment tracker."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import re
import shlex
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

from drawbar.trackers._connection import Connection, TrackedRun
from drawbar.trackers._cursor import Cursor
from drawbar.trackers._points import REDUCTIONS, Ranks
from drawbar.trackers._session import Sender, SenderThread
from drawbar.train import RunConfig, RunContext, RunEndInfo, UserCallback
from drawbar.train.backend import parse_duration, require_package
from drawbar.train.runs import ReportFeed

_DIGEST_DIGITS = 8

_logger = logging.getLogger("drawbar.trackers")


class Tracker(UserCallback, ABC):
    """Base class of trackers, which send the reports of a run to an experiment tracker.

    A tracker runs on a thread in the process that controls the run. It reads the reports from the
    run directory, and stores there how far it has sent them. So a restart, a resume, or a killed
    driver causes neither duplicates nor gaps, and all starts of a run are one run of the tracker.

    If the tracker fails, Drawbar logs one warning and retries with increasing delays. Training does
    not wait for it. After the run, `drawbar track` sends the missing reports.

    Args:
        ranks: Reports to send: a rank, such as 0; the "mean", "min", or "max" over all
            ranks; or "all", which adds a prefix such as "rank_3/" to the metric names.
        finish_timeout: Maximum time in seconds, or a timedelta, for which the end of the run waits
            for the tracker.

    Raises:
        ImportError: The tracker's package is not installed.
        TypeError: An argument has the wrong type.
        ValueError: An argument is invalid.

    Subclasses set the class attribute `kind`, and implement `get_options` and `connect`.

    Attributes:
        kind: Name of the tracker in the run directory, such as "aim".
        package: Module that must be installed; "" if there is none.

    Example:
        A tracker that prints the reports. The guide has a complete one:

            class Printer(Tracker):
                kind = "printer"

                def get_options(self):
                    return {}

                def connect(self, run, cursor):
                    return PrinterConnection(cursor)    # a subclass of Connection
    """

    kind: ClassVar[str]
    package: ClassVar[str] = ""

    def __init__(self, *, ranks: Ranks = 0, finish_timeout: float | timedelta = 30) -> None:
        if not hasattr(self, "kind"):
            raise TypeError(f'{type(self).__name__} needs a class attribute, such as kind = "aim"')
        if self._is_built_in():
            require_package(self.package, extra=self.kind)
        elif self.package and importlib.util.find_spec(self.package) is None:
            raise ModuleNotFoundError(
                f"{type(self).__name__} needs the package {self.package!r}, which is not installed",
                name=self.package,
            )
        self.ranks: Ranks = _check_ranks(ranks)
        self.finish_timeout = parse_duration("finish_timeout", finish_timeout)
        self._threads: dict[str, SenderThread] = {}  # by the id of the run

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_threads": {}}

    def __repr__(self) -> str:
        options: dict[str, object] = {**self._get_shown_options(), "ranks": self.ranks or None}
        set_options = {name: value for name, value in options.items() if value is not None}
        arguments = ", ".join(f"{name}={value!r}" for name, value in set_options.items())
        return f"{type(self).__name__}({arguments})"

    @abstractmethod
    def get_options(self) -> dict[str, str | None]:
        """Return the options that determine where the tracker stores points.

        Trackers with the same options have the same destination, which is an error in one run, and
        continue at the same position. The names are the arguments of the constructor.

        Returns:
            Values by name of the option; None for options that are not set.
        """

    @abstractmethod
    def connect(self, run: TrackedRun, cursor: Cursor) -> Connection:
        """Connect to the tracker, and continue its run if it exists.

        Called on the thread of the tracker, again after each failure.

        Args:
            run: Run whose reports are sent. The tracker finds its own run by `run.run_id`.
            cursor: Stored position.

        Returns:
            The connection. It starts at `cursor`, or at `Cursor()` if the tracker has no points of
            the run, for example because its data was deleted.
        """

    def _is_built_in(self) -> bool:
        """Return whether Drawbar has this tracker, so that `drawbar track` accepts it."""
        return type(self).__module__.partition(".")[0] == "drawbar"

    def _make_sender(self, open_feed: Callable[..., ReportFeed]) -> Sender:
        # One cursor for each destination: another one has none of the reports.
        values = [f"{name}={value}" for name, value in self.get_options().items() if value]
        digest = hashlib.sha256("\n".join(values).encode()).hexdigest()[:_DIGEST_DIGITS]
        name = f"{self.kind}-{digest}" if values else self.kind
        return Sender(open_feed, self.connect, name, self.ranks)

    def _get_shown_options(self) -> dict[str, str | None]:
        """Return the options without passwords in URLs."""
        return {
            name: value and re.sub("//[^/@]*@", "//***@", value)
            for name, value in self.get_options().items()
        }

    # -- during a run

    def check_run_config(self, run_config: RunConfig) -> None:
        """Check that no other tracker of the run has the same destination.

        Args:
            run_config: Configuration of the run.

        Raises:
            ValueError: Another tracker has the same destination.
        """
        trackers = [other for other in run_config.callbacks if isinstance(other, Tracker)]
        same = [other for other in trackers if other.kind == self.kind]
        same = [other for other in same if other.get_options() == self.get_options()]
        if len(same) > 1:  # also if it is one object twice
            raise ValueError(
                f"RunConfig(callbacks=...) has two trackers with the same destination: "
                f"{same[0]!r} and {same[1]!r}. Remove one of them, or set another "
                f"{', '.join(self.get_options())}."
            )

    def on_run_start(self, run_context: RunContext) -> None:
        """Start to send the reports of a run.

        Args:
            run_context: The run.
        """
        filesystem = run_context.run_config.storage_filesystem
        sender = self._make_sender(partial(ReportFeed, run_context.path, filesystem))
        warn = partial(self._warn, run_context.path)
        self._threads[run_context.run_id] = SenderThread(sender, warn)

    def on_run_end(self, run_context: RunContext, info: RunEndInfo) -> None:
        """Send the remaining reports, for at most `finish_timeout`.

        Args:
            run_context: The run.
            info: Outcome of the run.
        """
        thread = self._threads.pop(run_context.run_id, None)
        if thread is not None:
            thread.finish(self.finish_timeout)

    def _warn(self, path: str, reason: str) -> None:
        _logger.warning(
            "%s has failed: %s. Training continues, and Drawbar retries until the end of the run. "
            "After the run, send missing reports with: %s",
            type(self).__name__,
            reason,
            self.make_command(path) if self._is_built_in() else f"{self!r}.send({path!r})",
        )

    # -- after a run

    def make_command(self, path: str) -> str:
        """Return the command that sends the missing reports of a run.

        Trackers that are not part of Drawbar have no command. Call `send` instead.

        Args:
            path: Path or URI of the run directory.

        Returns:
            A command line for a shell.

        Example:
            >>> TensorBoard("/shared/tb").make_command("/shared/runs/a")
            'drawbar track /shared/runs/a --to tensorboard --log-dir /shared/tb'
        """
        words = ["drawbar", "track", path, "--to", self.kind]
        for name, value in self._get_shown_options().items():
            if value is not None:
                words += [f"--{name.replace('_', '-')}", value]
        if self.ranks != 0:
            words += ["--ranks", str(self.ranks)]
        return shlex.join(words)

    def send(self, path: str, *, from_start: bool = False) -> int:
        """Send the missing reports of a run, and return when the tracker has them.

        Args:
            path: Run directory, its URI, or a name in the default storage path.
            from_start: Whether to send all reports, because the tracker's data was deleted.

        Returns:
            The number of reports that were sent.

        Raises:
            RuntimeError: Another process, such as the active run, sends its reports there.
            Exception: The run cannot be read, or the tracker failed.

        Example:
            Send the reports of an old run:

                TensorBoard("/shared/tensorboard").send("/shared/runs/experiment")
        """
        sender = self._make_sender(partial(ReportFeed, path))
        try:
            sender.open(from_start=from_start)
            count = sender.send()
            sender.close()
        finally:
            sender.abandon()
        return count


def _check_ranks(ranks: object) -> Ranks:
    if isinstance(ranks, int) and not isinstance(ranks, bool) and ranks >= 0:
        return ranks
    for name in ("all", *REDUCTIONS):
        if ranks == name:
            return name  # type: ignore[return-value]
    raise ValueError(
        f'ranks={ranks!r} must be the number of a rank, such as 0, or "mean", "min", "max", or '
        '"all".'
    )
