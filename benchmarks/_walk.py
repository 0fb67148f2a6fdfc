"""List the core modules that fit() and report() pass through: `python -m benchmarks._walk`.

The path of `fit()` ends at the first line of user code, and the path of `report(metrics)` at the
console line. Stacks are captured where work passes to another thread or process, and at the end.
They contain the files that a reader of the code opens when following the calls. The paths are
traced with `num_workers=0` and with one worker. For `fit()`, all files with functions that the
driver called are also counted, since functions that check and prepare have returned by then.
"""

from __future__ import annotations

import os
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType
from unittest import mock

from drawbar import train
from drawbar.train._console import console
from drawbar.train._console.displays import PlainDisplay

CORE = str(Path(train.__file__).parent) + os.sep
HANDED_ON = ("_send_from_thread", "put")  # by the function's thread, to the loop or to the actor
TAKEN_UP = ("hear", "_listen")  # by the controller's thread


class WatchedView(PlainDisplay):
    """Keeps the stack of what shows a report."""

    shown_by: list[str]

    def reported(self) -> None:
        """Show a report."""
        WatchedView.shown_by = files_on(sys._getframe(1), since=TAKEN_UP)
        super().on_report()


def files_on(frame: FrameType | None, since: tuple[str, ...]) -> list[str]:
    """Return the core files on a stack, from the outermost function of these names."""
    files: list[str] = []
    found: list[str] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(CORE):
            files.insert(0, frame.f_code.co_filename.removeprefix(CORE))
            if frame.f_code.co_name in since:
                found = list(files)
        frame = frame.f_back
    return found


class FitWatch:
    """Trace calls in this process from `fit()` until the workers are started."""

    def __init__(self) -> None:
        self.stacks: list[str] = []
        self.touched: set[str] = set()
        self._over = False

    def start(self) -> None:
        """Look at this thread and at those that begin from now on."""
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    def stop(self) -> None:
        """Look no longer."""
        self._over = True
        sys.setprofile(None)
        threading.setprofile(None)

    def _look(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self._over or event != "call":
            return
        if code.co_filename.startswith(CORE):
            file = code.co_filename.removeprefix(CORE)
            self.touched.add(file)
            if code.co_name == "run" and file.startswith("_group"):
                self.stacks += files_on(frame, since=("_run",))
                self._over = True
        elif code.co_name == "start" and code.co_filename == threading.__file__:
            self.stacks += files_on(frame, since=("fit",))


def train_func() -> tuple[list[str], list[str]]:
    """Report once; gives the files up to this line, and up to where the report is handed on."""
    begun_by = files_on(sys._getframe(1), since=("run", "_run_and_send_outcome", "job"))
    said_by: list[str] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(CORE) and code.co_name in HANDED_ON:
            said_by.extend(files_on(frame, since=("report",)))

    sys.setprofile(look)
    train.report({"loss": 0.5})
    sys.setprofile(None)
    return begun_by, said_by


def walk(num_workers: int) -> tuple[list[str], list[str], int]:
    """Trace a run and return its call paths.

    Returns:
        Files from `fit()` to the first line of user code, files of a report, and the number of
        files in which `fit()` calls functions until the workers are started.
    """
    view = mock.patch.object(
        console, "PlainDisplay", WatchedView
    )  # the display for output that is not a terminal
    with view, tempfile.TemporaryDirectory() as folder:
        trainer = train.DataParallelTrainer(
            train_func,
            scaling_config=train.ScalingConfig(num_workers=num_workers),
            run_config=train.RunConfig(storage_path=folder),
        )
        watch = FitWatch()
        watch.start()
        result = trainer.fit()
        watch.stop()
    ((begun_by, said_by),) = result.return_values
    fit = dict.fromkeys([*watch.stacks, *begun_by])
    report = dict.fromkeys([*said_by, *WatchedView.shown_by, "_console/views.py"])
    return list(fit), list(report), len(watch.touched)


if __name__ == "__main__":
    for count in (0, 1):
        fit, report, touched = walk(count)
        print(f"num_workers={count}")
        print(f"  fit(), {len(fit)} files: {', '.join(fit)}; calls into {touched}")
        print(f"  report(), {len(report)} files: {', '.join(report)}")
