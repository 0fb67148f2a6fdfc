"""Driver of a run with a tracker: `python driver.py STORAGE TRACKER OPTIONS START`.

The first start is killed after the tracker has received some reports. The second one is killed
after the tracker has stored points, and before it stores its cursor. The third one finishes.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

from drawbar import trackers
from drawbar.train import (
    Checkpoint,
    DataParallelTrainer,
    RunConfig,
    ScalingConfig,
    get_checkpoint,
    report,
)
from drawbar.train.runs import ReportFeed

NUM_REPORTS = 30
REPORTS_PER_CHECKPOINT = 4
STORAGE, TRACKER, OPTIONS, START = sys.argv[1:]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def wait_for_cursor() -> None:
    """Wait until the tracker has stored its cursor."""
    directory = Path(STORAGE) / "run" / "trackers"
    while not list(directory.glob("*.json")):
        time.sleep(0.01)


def train() -> None:
    first = 0
    if checkpoint := get_checkpoint():
        with checkpoint.as_directory() as path:
            first = int((Path(path) / "next").read_text())
    for index in range(first, NUM_REPORTS):
        if START == "0" and index == 6:
            wait_for_cursor()
        if START == "0" and index == 11:
            die()
        if START == "1" and index == 18:
            signal.pause()  # until the tracker thread kills this process
        metrics = {
            "loss": index + int(START) / 10,
            "nested": {"nan": float("nan")},
            'odd <name>\n"\u2028é%': index,
            "text": "not a number",
        }
        saved = None
        with tempfile.TemporaryDirectory() as path:
            if index % REPORTS_PER_CHECKPOINT == REPORTS_PER_CHECKPOINT - 1:
                (Path(path) / "next").write_text(str(index + 1))
                saved = Checkpoint.from_directory(path)
            report(metrics, checkpoint=saved)


if __name__ == "__main__":
    if START == "1":
        save_state = ReportFeed.save_state

        def save_or_die(feed: ReportFeed, name: str, state: dict[str, int]) -> None:
            if state["end"] >= 18:
                die()
            save_state(feed, name, state)

        ReportFeed.save_state = save_or_die  # type: ignore[method-assign, assignment]
    tracker = getattr(trackers, TRACKER)(**json.loads(OPTIONS))
    DataParallelTrainer(
        train,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=STORAGE, callbacks=[tracker]),
    ).fit()
