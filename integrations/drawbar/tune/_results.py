"""The files that Ray Tune writes a trial's results into, when the trial starts again."""

from __future__ import annotations

import os

from ray.tune.experiment import Trial
from ray.tune.logger import LoggerCallback

_fetch_copy = LoggerCallback._restore_from_remote


def keep_results() -> None:
    """Have Ray Tune's loggers in this process go on with the files that lie here.

    Tune writes `result.json` and `progress.csv` beside its controller, and copies them into the
    storage every ten seconds or so. When a trial starts again from a checkpoint, after a failure or
    a pause, the loggers fetch that copy over the file that it was made of, and all results since
    are lost (ray-project/ray#38598). No setting of Tune's keeps them from that. A sweep that is
    restored has no such files yet, and gets the copies as ever.
    """
    LoggerCallback._restore_from_remote = _fetch_missing_copy  # type: ignore[method-assign]  # why: above


def _fetch_missing_copy(self: LoggerCallback, file_name: str, trial: Trial) -> None:
    if not os.path.exists(f"{trial.local_path}/{file_name}"):
        _fetch_copy(self, file_name, trial)
