"""Asynchronous 1 GB checkpoint: how long the training loop is blocked."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._cluster import fresh_cluster
from benchmarks._libraries import DRAWBAR, RAY_TRAIN, Library
from benchmarks._scenario import Goal, Measure, Samples, Scenario, faster_than_ray_train

GIGABYTE = 10**9
BLOCK = 2**20
REPETITIONS = 3
LONGEST_PAUSE_SECONDS = 0.05


def _write(folder: Path, nbytes: int) -> None:
    """Write one file, and have the disk finish with it before anything is measured."""
    block = os.urandom(BLOCK)
    with (folder / "model.bin").open("wb") as stream:
        for start in range(0, nbytes, BLOCK):
            stream.write(block[: nbytes - start])
    os.sync()


def _function(library: Library, scratch: str, nbytes: int) -> Callable[[], list[float]]:
    """Make the training function; rank 0 gives the seconds that each of its reports took."""

    def function() -> list[float]:
        train = library.train
        pauses = []
        for _ in range(REPETITIONS):
            if train.get_context().get_world_rank() != 0:
                train.report({"loss": 0.5})
                continue
            folder = tempfile.mkdtemp(dir=scratch)
            _write(Path(folder), nbytes)
            start = time.perf_counter()
            train.report(
                {"loss": 0.5},
                checkpoint=train.Checkpoint.from_directory(folder),
                checkpoint_upload_mode=train.CheckpointUploadMode.ASYNC,
            )
            pauses.append(time.perf_counter() - start)
        return pauses

    return function


def _measure(library: Library, nbytes: int) -> Samples:
    with fresh_cluster() as storage:
        function = _function(library, str(storage), nbytes)
        result = library.trainer(function, storage=storage).fit()
        return {"pause": result.return_value}


def _drawbar(nbytes: int = GIGABYTE) -> Samples:
    return _measure(DRAWBAR, nbytes)


def _ray_train(nbytes: int = GIGABYTE) -> Samples:
    return _measure(RAY_TRAIN, nbytes)


def _bare(nbytes: int = GIGABYTE) -> Samples:
    pauses = []
    with tempfile.TemporaryDirectory(prefix="drawbar-benchmark-") as scratch:
        for number in range(REPETITIONS):
            source = Path(scratch, f"source-{number}")
            source.mkdir()
            _write(source, nbytes)
            start = time.perf_counter()
            shutil.copytree(source, Path(scratch, f"copy-{number}"))
            pauses.append(time.perf_counter() - start)
            shutil.rmtree(source)
    return {"pause": pauses}


SCENARIO = Scenario(
    name="async_report",
    title="report() of a 1 GB checkpoint with CheckpointUploadMode.ASYNC, by rank 0 of 2 workers",
    note=(
        "A directory of the user's own on the storage's filesystem, handed over, as is ASYNC's "
        "default. bare: shutil.copytree of it, which is what a loop would do by itself."
    ),
    measures=(
        Measure(
            key="pause",
            label="training loop blocked",
            goals=(
                Goal(over="drawbar", at_most=LONGEST_PAUSE_SECONDS),
                faster_than_ray_train(),
            ),
        ),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "bare": _bare},
)
