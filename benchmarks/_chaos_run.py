"""The run that chaos strikes: its driver, and what its workers do.

`python -m benchmarks._chaos_run FOLDER HAZARD...` starts or resumes it on the cluster of
`RAY_ADDRESS`. The hazards are what it does besides saving files:

- `links`: each rank's checkpoints have links to a folder and a file of the user's own, which must
  stay as they are.
- `handover`: some checkpoints are folders of the user's own, given away with ASYNC.
- `elastic`: the group shrinks and grows.
- `fork`: workers are forked from a fork server.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HAZARDS = ("links", "handover", "elastic", "fork")
WORKERS = 4
FEWEST_WORKERS = 2  # of an elastic group
STEP_SECONDS = 0.02
CHECKPOINTS_KEPT = 5
LINES = 10_000
KEPT = "the user's own\n"
METRIC_REPORTS = 3  # reports without a checkpoint between two checkpoints
SEGMENT_BYTES = 4000  # small, so that segments are closed and compressed all the time


def drive(folder: Path, hazards: frozenset[str]) -> None:
    """Run the training function, or resume it."""
    from drawbar import train
    from drawbar._records import report_log

    class ShownReports(train.UserCallback):
        """Record the reports that a callback has received."""

        def after_report(self, run_context: Any, metrics: Any, checkpoint: Any) -> None:
            if "number" in metrics[0]:
                with open(folder / "shown", "a") as file:
                    file.write(f"{metrics[0]['attempt']} {metrics[0]['number']}\n")

    report_log.SEGMENT_BYTES = SEGMENT_BYTES
    enough = folder / "enough"
    workers = (FEWEST_WORKERS, WORKERS) if "elastic" in hazards else WORKERS
    train.DataParallelTrainer(
        lambda: train_until(enough, hazards),
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(
            name="run",
            storage_path=folder,
            failure_config=train.FailureConfig(
                max_failures=-1, max_preemption_failures=-1, max_startup_failures=-1
            ),
            checkpoint_config=train.CheckpointConfig(num_to_keep=CHECKPOINTS_KEPT),
            callbacks=[ShownReports()],
            forkserver_preload=["http.server"] if "fork" in hazards else [],
        ),
    ).fit()


def train_until(enough: Path, hazards: frozenset[str]) -> int:
    """Checkpoint in a loop until that file is there, every third time asynchronously."""
    from drawbar import train

    later = train.CheckpointUploadMode.ASYNC

    folder = enough.parent
    context, checkpoint = train.get_context(), train.get_checkpoint()
    _start_child(context.cache, folder)
    rank, size = context.get_world_rank(), context.get_world_size()
    linked = _link_target(folder, rank) if "links" in hazards else None
    step = step_of(Path(checkpoint)) + 1 if checkpoint else 0
    number = 0
    while not train.collective.broadcast_from_rank_zero(enough.exists()):
        for _ in range(METRIC_REPORTS):
            train.report({"attempt": context.get_attempt(), "number": number})
            number += 1
        if step % 6 == 5 and "handover" in hazards:
            path = folder / f"own_{context.get_attempt()}_{rank}_{step}"
            path.mkdir()
            _save(path, step, rank, size, linked)
            train.report({"step": step}, checkpoint=path, checkpoint_upload_mode=later)
        else:
            with train.checkpoint_dir() as path:
                _save(path, step, rank, size, linked)
                mode = later if step % 3 == 2 else train.CheckpointUploadMode.SYNC
                train.report({"step": step}, checkpoint=path, checkpoint_upload_mode=mode)
        if step % 3 != 2:
            _append(folder / "acknowledged", step)
        step += 1
        time.sleep(STEP_SECONDS)
    return step


def _save(folder: Path, step: int, rank: int, size: int, linked: Path | None) -> None:
    (folder / f"rank_{rank}").write_text(f"{step} of {size}\n" * LINES)
    if linked is not None:
        (folder / f"folder_{rank}").symlink_to(linked)
        (folder / f"file_{rank}").symlink_to(linked / "kept")


def make_link_targets(folder: Path) -> None:
    """Make the folders of the user's own that the checkpoints of each rank have links to."""
    for rank in range(WORKERS):
        target = _link_target(folder, rank)
        target.mkdir(parents=True)
        (target / "kept").write_text(KEPT)


def check_link_targets(folder: Path) -> None:
    """Check that the targets of the links are unchanged."""
    for rank in range(WORKERS):
        files = {path.name: path.read_text() for path in _link_target(folder, rank).iterdir()}
        assert files == {"kept": KEPT}, f"of what rank {rank} has links to, there is {files}"


def _link_target(folder: Path, rank: int) -> Path:
    return folder / "linked" / f"rank_{rank}"


def _start_child(cache: dict[Any, Any], folder: Path) -> None:
    """Start a process in a separate session that must not outlive the worker."""
    if "child" not in cache:
        cache["child"] = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        _append(folder / "children", cache["child"].pid)


def _append(path: Path, number: int) -> None:
    with open(path, "a") as file:  # one short line at a time is not torn
        file.write(f"{number}\n")


def numbers(path: Path) -> list[int]:
    """Read what `_append` has written, also by a process that was killed meanwhile."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def shown_reports(folder: Path) -> set[tuple[int, int]]:
    """Return the attempt and the number of each report that a callback has received."""
    path = folder / "shown"
    lines = path.read_text().splitlines() if path.exists() else []
    return {(int(attempt), int(number)) for attempt, number in map(str.split, lines)}


def step_of(checkpoint: Path) -> int:
    """Load a checkpoint: complete files of all ranks for the same step, and link targets."""
    line = (checkpoint / "rank_0").read_text().partition("\n")[0]
    step, _, size = line.partition(" of ")
    for rank in range(int(size)):
        text = (checkpoint / f"rank_{rank}").read_text()
        assert text == f"{line}\n" * LINES, f"rank {rank}'s file in {checkpoint} is not of {line}"
        for linked in (checkpoint / f"file_{rank}", checkpoint / f"folder_{rank}" / "kept"):
            assert not linked.exists() or linked.read_text() == KEPT, f"{linked} is not {KEPT}"
    return int(step)


if __name__ == "__main__":
    drive(Path(sys.argv[1]), frozenset(sys.argv[2:]))
