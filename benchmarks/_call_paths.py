"""List the core modules that fit() and report() pass through: `python -m benchmarks._call_paths`.

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
from types import FrameType
from unittest import mock

import drawbar
from drawbar import train
from drawbar._console import console
from drawbar._console.displays import PlainDisplay

ROOTS = tuple(os.path.join(path, "") for path in drawbar.__path__)
SEND_FUNCTIONS = ("_send_from_thread", "put")
"""Functions that pass a message from the thread of the training function to another thread."""

RECEIVE_FUNCTIONS = ("on_messages", "_receive_messages")
"""Functions in which the thread of the controller starts to handle messages."""


class TracedDisplay(PlainDisplay):
    """Display for output that is not a terminal, which records the stack when it shows a report."""

    files: list[str]

    def on_report(self) -> None:
        """Show a report."""
        own_file = get_short_name(PlainDisplay.on_report.__code__.co_filename)
        TracedDisplay.files = [*list_files(sys._getframe(0), start=RECEIVE_FUNCTIONS), own_file]
        super().on_report()


def get_short_name(file: str) -> str:
    """Return the path of a file of Drawbar, without the directory of the kernel."""
    for root in ROOTS:
        file = file.removeprefix(root)
    return file.removeprefix(os.path.join("train", ""))


def list_files(frame: FrameType | None, start: tuple[str, ...]) -> list[str]:
    """Return the core files on a stack, from the outermost function with one of these names."""
    files: list[str] = []
    found: list[str] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(ROOTS):
            files.insert(0, get_short_name(frame.f_code.co_filename))
            if frame.f_code.co_name in start:
                found = list(files)
        frame = frame.f_back
    return found


class FitTracer:
    """Trace the calls of this process from `fit()` until the workers run.

    Attributes:
        stack_files: Core files on the path of the calls.
        called_files: Core files with functions that were called.
    """

    def __init__(self) -> None:
        self.stack_files: list[str] = []
        self.called_files: set[str] = set()
        self._is_stopped = False

    def start(self) -> None:
        """Trace this thread and the threads that start from now on."""
        threading.setprofile(self._on_call)
        sys.setprofile(self._on_call)

    def stop(self) -> None:
        """Stop tracing."""
        self._is_stopped = True
        sys.setprofile(None)
        threading.setprofile(None)

    def _on_call(self, frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if self._is_stopped or event != "call":
            return
        if code.co_filename.startswith(ROOTS):
            file = get_short_name(code.co_filename)
            self.called_files.add(file)
            if code.co_name == "run" and file.startswith("_worker_group"):
                self.stack_files += list_files(frame, start=("_run",))
                self._is_stopped = True
        elif code.co_name == "start" and code.co_filename == threading.__file__:
            self.stack_files += list_files(frame, start=("fit",))


def train_func() -> tuple[list[str], list[str]]:
    """Report once and return the files up to this function, and the files that `report()` uses."""
    start_files = list_files(sys._getframe(1), start=("run", "job"))
    report_files: list[str] = []

    def on_call(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        is_send = code.co_filename.startswith(ROOTS) and code.co_name in SEND_FUNCTIONS
        if event == "call" and is_send:
            report_files.extend(list_files(frame, start=("report",)))

    sys.setprofile(on_call)
    train.report({"loss": 0.5})
    sys.setprofile(None)
    return start_files, report_files


def trace_run(num_workers: int) -> tuple[list[str], list[str], int]:
    """Trace a run.

    Args:
        num_workers: Number of workers: 0 or 1.

    Returns:
        Files from `fit()` to the first line of user code, files of a report, and the number of
        files in which `fit()` calls functions until the workers are started.
    """
    display = mock.patch.object(console, "PlainDisplay", TracedDisplay)
    with display, tempfile.TemporaryDirectory() as folder:
        trainer = train.DataParallelTrainer(
            train_func,
            scaling_config=train.ScalingConfig(num_workers=num_workers),
            run_config=train.RunConfig(storage_path=folder),
        )
        tracer = FitTracer()
        tracer.start()
        result = trainer.fit()
        tracer.stop()
    ((start_files, report_files),) = result.return_values
    fit_files = dict.fromkeys([*tracer.stack_files, *start_files])
    all_report_files = dict.fromkeys([*report_files, *TracedDisplay.files])
    return list(fit_files), list(all_report_files), len(tracer.called_files)


if __name__ == "__main__":
    for count in (0, 1):
        fit, report, called = trace_run(count)
        print(f"num_workers={count}")
        print(f"  fit(), {len(fit)} files: {', '.join(fit)}; calls into {called}")
        print(f"  report(), {len(report)} files: {', '.join(report)}")
