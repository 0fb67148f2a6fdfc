"""Bytes that all processes of a run write for each byte of a checkpoint."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks._cluster import fresh_cluster
from benchmarks._libraries import DRAWBAR, RAY_TRAIN, Library
from benchmarks._scenario import Goal, Measure, Samples, Scenario

SHARE = 64 * 2**20
"""Bytes that each of the two ranks gives to each checkpoint."""

REPETITIONS = 4
AT_MOST = Goal(over="drawbar", at_most=1.05)


def _written() -> int:
    """Return the number of bytes that this process has written with write() and similar calls."""
    import psutil

    return int(psutil.Process().io_counters().write_chars)


@contextmanager
def _counted(into: list[int]) -> Iterator[None]:
    before = _written()
    yield
    into.append(_written() - before)


def _write(folder: str | os.PathLike[str], rank: int, share: int) -> None:
    (Path(folder) / f"rank_{rank}").write_bytes(os.urandom(share))


def _own_directory(library: Library, scratch: str, share: int) -> Callable[[], int]:
    """Return a function that reports an external directory; writing it is not counted."""

    def function() -> int:
        train, counts = library.train, list[int]()
        for _ in range(REPETITIONS):
            with tempfile.TemporaryDirectory(dir=scratch) as folder:
                _write(folder, train.get_context().get_world_rank(), share)
                with _counted(counts):
                    train.report({}, checkpoint=train.Checkpoint.from_directory(folder))
        return sum(counts)

    return function


def _given_directory(share: int) -> Callable[[], int]:
    """Make the function that writes where the checkpoint will lie; all of that is counted."""

    def function() -> int:
        train, counts = DRAWBAR.train, list[int]()
        for _ in range(REPETITIONS):
            with _counted(counts), train.checkpoint_dir() as folder:
                _write(folder, train.get_context().get_world_rank(), share)
                train.report({}, checkpoint=folder)
        return sum(counts)

    return function


def _ratio(library: Library, function: Callable[[], int], share: int, **where: Any) -> float:
    """Return the bytes that workers and driver wrote per byte of the checkpoints."""
    trainer = library.trainer(function, **where)
    in_driver: list[int] = []
    with _counted(in_driver):
        result = trainer.fit()
    in_workers: list[int] = getattr(result, "return_values", None) or [result.return_value] * 2
    return (sum(in_workers) + sum(in_driver)) / (2 * REPETITIONS * share)


def _drawbar(share: int = SHARE) -> Samples:
    from fsspec.implementations.local import LocalFileSystem

    with fresh_cluster() as storage:
        copied = _own_directory(DRAWBAR, str(storage), share)
        not_mounted = LocalFileSystem(auto_mkdir=True)
        return {
            "given": [_ratio(DRAWBAR, _given_directory(share), share, storage=storage)],
            "own": [_ratio(DRAWBAR, copied, share, storage=storage)],
            "remote": [_ratio(DRAWBAR, copied, share, storage=storage, filesystem=not_mounted)],
        }


def _ray_train(share: int = SHARE) -> Samples:
    with fresh_cluster() as storage:
        copied = _own_directory(RAY_TRAIN, str(storage), share)
        return {"own": [_ratio(RAY_TRAIN, copied, share, storage=storage)]}


SCENARIO = Scenario(
    name="bytes_written",
    title="Bytes written per byte of a checkpoint, 2 workers with 64 MB each",
    note=(
        "wchar of /proc/<pid>/io, of both workers and the driver. The user's own writing counts "
        "inside checkpoint_dir(), where it is the only one, and not for a directory of their own, "
        "which is copied. Remote: through fsspec, as to an object store."
    ),
    measures=(
        Measure(
            key="given", label="checkpoint_dir()", unit="", goals=(AT_MOST,), sides=("drawbar",)
        ),
        Measure(key="own", label="the user's own directory", unit="", goals=(AT_MOST,)),
        Measure(
            key="remote",
            label="the user's own directory, remote storage",
            unit="",
            goals=(AT_MOST,),
            sides=("drawbar",),
        ),
    ),
    sides={"drawbar": _drawbar, "ray.train": _ray_train},
)
