"""A checkpoint of 256 MB: what report() takes once the bytes are written."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks._cluster import fresh_cluster
from benchmarks._libraries import DRAWBAR, RAY_TRAIN, Library
from benchmarks._scenario import (
    Measure,
    Samples,
    Scenario,
    cost_over_bare,
    faster_than_ray_train,
)

BLOCK = 2**20
BLOCKS = 256
REPETITIONS = 4


def _write(folder: Path) -> float:
    """Write one file of 256 MB; give the seconds of that.

    What comes before is forced to the disk first, and these bytes afterwards, so that the disk has
    nothing else to do in what is measured next.
    """
    os.sync()
    model = folder / "model.bin"
    seconds = _write_blocks(model)
    os.sync()
    _fault_in_page_cache(model)
    return seconds


def _write_blocks(path: Path) -> float:
    block = os.urandom(BLOCK)
    start = time.perf_counter()
    with path.open("wb") as stream:
        for _ in range(BLOCKS):
            stream.write(block)
    return time.perf_counter() - start


def _fault_in_page_cache(model: Path) -> None:
    """Copy and delete the file, so that the pages needed next are already backed by memory.

    In a virtual machine the first touch of a page costs ten times the copy into it, and would hit
    one side or the other by chance.
    """
    for _ in range(2):
        scratch = shutil.copyfile(model, model.with_name("scratch"))
        scratch.unlink()


def _report(library: Library, folder: str) -> float:
    train = library.train
    checkpoint = train.Checkpoint.from_directory(folder)
    start = time.perf_counter()
    train.report({"loss": 0.5}, checkpoint=checkpoint)
    return time.perf_counter() - start


def _own_directory(library: Library, scratch: str) -> Callable[[], Samples]:
    """Return a training function that reports an external directory to be copied."""

    def function() -> Samples:
        samples: Samples = {"write": [], "directory": []}
        for _ in range(REPETITIONS):
            if library.train.get_context().get_world_rank() != 0:
                library.train.report({"loss": 0.5})
                continue
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                samples["write"].append(_write(Path(folder)))
                samples["directory"].append(_report(library, folder))
        return samples

    return function


def _given_directory(library: Library) -> Callable[[], Samples]:
    """Make the training function that writes where the checkpoint will lie."""

    def function() -> Samples:
        samples: Samples = {"write": [], "checkpoint_dir": []}
        for _ in range(REPETITIONS):
            if library.train.get_context().get_world_rank() != 0:
                library.train.report({"loss": 0.5})
                continue
            with library.train.checkpoint_dir() as folder:
                samples["write"].append(_write(Path(folder)))
                samples["checkpoint_dir"].append(_report(library, str(folder)))
        return samples

    return function


def _drawbar() -> Samples:
    with fresh_cluster() as storage:
        copied = _own_directory(DRAWBAR, str(storage))
        renamed = _given_directory(DRAWBAR)
        samples: Samples = DRAWBAR.trainer(copied, storage=storage).fit().return_value
        more: Samples = DRAWBAR.trainer(renamed, storage=storage).fit().return_value
    return {**samples, **more, "write": samples["write"] + more["write"]}


def _ray_train() -> Samples:
    with fresh_cluster() as storage:
        function = _own_directory(RAY_TRAIN, str(storage))
        samples: Samples = RAY_TRAIN.trainer(function, storage=storage).fit().return_value
    return {**samples, "checkpoint_dir": samples["directory"]}


def _bare() -> Samples:
    samples: Samples = {"write": [], "directory": []}
    with tempfile.TemporaryDirectory(prefix="drawbar-benchmark-") as scratch:
        for number in range(REPETITIONS):
            source = Path(scratch, f"source-{number}")
            source.mkdir()
            samples["write"].append(_write(source))
            start = time.perf_counter()
            shutil.copytree(source, Path(scratch, f"copy-{number}"))
            samples["directory"].append(time.perf_counter() - start)
    return {**samples, "checkpoint_dir": samples["directory"]}


SCENARIO = Scenario(
    name="checkpoint",
    title="report() of a 256 MB checkpoint by rank 0 of 2 workers",
    note=(
        "bare: shutil.copytree of the same file on the same filesystem, in both rows. ray.train "
        "has one way, which is shown in both rows."
    ),
    measures=(
        Measure(key="write", label="write 256 MB, before the report"),
        Measure(
            key="directory",
            label="report() of the user's own directory",
            goals=(cost_over_bare(), faster_than_ray_train()),
        ),
        Measure(
            key="checkpoint_dir",
            label="report() inside checkpoint_dir()",
            goals=(cost_over_bare(at_most=0.1), faster_than_ray_train()),
        ),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train, "bare": _bare},
)
