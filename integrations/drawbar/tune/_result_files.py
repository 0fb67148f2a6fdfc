"""The files that Ray Tune writes a trial's results into, when the trial starts again."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ray.tune.experiment import Trial
from ray.tune.logger import LoggerCallback
from ray.tune.result import (  # type: ignore[attr-defined]  # not public
    EXPR_PROGRESS_FILE,
    EXPR_RESULT_FILE,
    TRAINING_ITERATION,
)

_original_restore = LoggerCallback._restore_from_remote


def patch_result_restore() -> None:
    """Have Ray Tune's loggers in this process go on with the files that lie here.

    Tune writes `result.json` and `progress.csv` beside its controller, and copies them into the
    storage every ten seconds or so. When a trial starts again from a checkpoint, after a failure or
    a pause, the loggers fetch that copy over the file that it was made of, and all results since
    are lost (ray-project/ray#38598). No setting of Tune's keeps them from that. A sweep that is
    restored may have no such files yet, and gets the copies as ever.

    What came after the checkpoint will be reported again: the loggers, which only append, find the
    files without it.
    """
    LoggerCallback._restore_from_remote = _restore_results  # type: ignore[method-assign]  # why: above


def _restore_results(self: LoggerCallback, file_name: str, trial: Trial) -> None:
    file = Path(f"{trial.local_path}/{file_name}")
    if not file.exists():
        _original_restore(self, file_name, trial)
    if file.exists() and file_name in _ITERATION_READERS:
        checkpoint_result = trial.latest_checkpoint_result
        truncate_after(
            file,
            after=checkpoint_result.metrics.get(TRAINING_ITERATION, 0)
            if checkpoint_result
            else -math.inf,
        )


def truncate_after(file: Path, after: float) -> None:
    """Take off the results that came after a `training_iteration`, and a last line that is torn."""
    lines = file.read_bytes().splitlines(keepends=True)
    end = 0
    with contextlib.suppress(ValueError, TypeError):  # a driver was killed while it wrote
        for number, iteration in _ITERATION_READERS[file.name]([line.decode() for line in lines]):
            if iteration > after:
                break
            end = number
    os.truncate(file, sum(map(len, lines[:end])))


def _iter_json(lines: list[str]) -> Iterator[tuple[int, float]]:
    for number, line in enumerate(lines, 1):
        yield number, json.loads(line)[TRAINING_ITERATION]


def _iter_csv(lines: list[str]) -> Iterator[tuple[int, float]]:
    rows = csv.DictReader(lines)
    for row in rows:
        yield rows.line_num, float(row[TRAINING_ITERATION])


_ITERATION_READERS: dict[str, Callable[[list[str]], Iterator[tuple[int, float]]]] = {
    EXPR_RESULT_FILE: _iter_json,
    EXPR_PROGRESS_FILE: _iter_csv,
}
"""The results in a file: the number of the last line of each, and its `training_iteration`."""
