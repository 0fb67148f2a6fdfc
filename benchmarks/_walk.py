"""The files of the core that one `report(metrics)` crosses: `python -m benchmarks._walk`.

The way is from the user's call to the line on the console. The stacks are looked at where the
report is handed on to another thread or process, and where the line is shown: what stands on them
is what a reader opens who follows the calls. First with `num_workers=0`, then with a worker.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from types import FrameType
from unittest import mock

from drawbar import train
from drawbar.train._console import console
from drawbar.train._console.views import PlainView

CORE = str(Path(train.__file__).parent) + os.sep
HANDED_ON = ("_say_from_thread", "put")  # by the function's thread, to the loop or to the actor
TAKEN_UP = ("hear", "_listen")  # by the controller's thread


class WatchedView(PlainView):
    """Keeps the stack of what shows a report."""

    shown_by: list[str]

    def reported(self) -> None:
        """Show a report."""
        WatchedView.shown_by = files_on(sys._getframe(1), since=TAKEN_UP)
        super().reported()


def files_on(frame: FrameType | None, since: tuple[str, ...]) -> list[str]:
    """Give the core's files on a stack, since the outermost function of these names."""
    files: list[str] = []
    found: list[str] = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(CORE):
            files.insert(0, frame.f_code.co_filename.removeprefix(CORE))
            if frame.f_code.co_name in since:
                found = list(files)
        frame = frame.f_back
    return found


def train_func() -> list[str]:
    """Report once; gives the files up to where that is handed on."""
    said_by: list[str] = []

    def look(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(CORE) and code.co_name in HANDED_ON:
            said_by.extend(files_on(frame, since=("report",)))

    sys.setprofile(look)
    train.report({"loss": 0.5})
    sys.setprofile(None)
    return said_by


def walk(num_workers: int) -> list[str]:
    """Give the files that a report crosses in a run with so many workers, in order."""
    view = mock.patch.object(console, "PlainView", WatchedView)  # what is not a terminal gets one
    with view, tempfile.TemporaryDirectory() as folder:
        result = train.DataParallelTrainer(
            train_func,
            scaling_config=train.ScalingConfig(num_workers=num_workers),
            run_config=train.RunConfig(storage_path=folder),
        ).fit()
    (said_by,) = result.return_values
    return list(dict.fromkeys([*said_by, *WatchedView.shown_by, "_console/views.py"]))


if __name__ == "__main__":
    for count in (0, 1):
        files = walk(count)
        print(f"num_workers={count}: {len(files)} files: {', '.join(files)}")
