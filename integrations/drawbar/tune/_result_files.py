"""Keep Ray Tune's result files when a trial restarts."""

from __future__ import annotations

import contextlib
import csv
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from ray import tune
from ray.tune.experiment import Trial
from ray.tune.result import TRAINING_ITERATION  # type: ignore[attr-defined]  # not in its stubs

from drawbar.tune._compat import PROGRESS_FILE, RESULT_FILE, Restore, replace_result_restore


def keep_result_files(trainable: type[tune.Trainable]) -> None:
    """Make Ray Tune's loggers in this process continue with their local files of some trials.

    Tune writes `result.json` and `progress.csv` on the node of its controller, and copies them to
    the storage about every ten seconds. When a trial restarts from a checkpoint after a failure or
    a pause, the loggers overwrite the local files with these copies, and all newer results are lost
    (ray-project/ray#38598). Tune has no setting against this. If there are no local files, as in a
    restored sweep, the copies are still used.

    The trial reports the results after the checkpoint again. Loggers only append, so these results
    are removed from the files.

    Args:
        trainable: Base class of the trials.
    """
    replace_result_restore(_restore_results, trainable)


def _restore_results(file_name: str, trial: Trial, restore_by_tune: Restore) -> None:
    file = Path(f"{trial.local_path}/{file_name}")
    if not file.exists():
        restore_by_tune(file_name, trial)
    if file.exists() and file_name in _ITERATION_READERS:
        checkpoint_result = trial.latest_checkpoint_result
        truncate_after(
            file,
            after=checkpoint_result.metrics.get(TRAINING_ITERATION, 0)
            if checkpoint_result
            else -math.inf,
        )


def truncate_after(file: Path, after: float) -> None:
    """Remove the results after a `training_iteration`, and an incomplete last line."""
    lines = file.read_bytes().splitlines(keepends=True)
    end = 0
    with contextlib.suppress(ValueError, TypeError):  # the driver was killed during a write
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
    RESULT_FILE: _iter_json,
    PROGRESS_FILE: _iter_csv,
}
"""Readers of result files. They yield the last line number and `training_iteration` of each
result."""
