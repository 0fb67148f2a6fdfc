"""The run that chaos strikes: its driver, and what its workers do.

`python -m benchmarks._chaos_run FOLDER` starts or resumes it on the cluster of `RAY_ADDRESS`.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORKERS = 4
STEP_SECONDS = 0.02
CHECKPOINTS_KEPT = 5


def drive(folder: Path) -> None:
    """Run the training function, or go on with it."""
    from drawbar import train

    enough = folder / "enough"
    train.DataParallelTrainer(
        lambda: train_until(enough),
        scaling_config=train.ScalingConfig(num_workers=WORKERS),
        run_config=train.RunConfig(
            name="run",
            storage_path=folder,
            failure_config=train.FailureConfig(
                max_failures=-1, max_preemption_failures=-1, max_startup_failures=-1
            ),
            checkpoint_config=train.CheckpointConfig(num_to_keep=CHECKPOINTS_KEPT),
        ),
    ).fit()


def train_until(enough: Path) -> int:
    """Checkpoint in a loop until that file is there, every third time asynchronously."""
    from drawbar import train

    folder = enough.parent
    context, checkpoint = train.get_context(), train.get_checkpoint()
    _start_child(context.cache, folder)
    mine = f"rank_{context.get_world_rank()}"
    step = step_of(Path(checkpoint)) + 1 if checkpoint else 0
    while not train.collective.broadcast_from_rank_zero(enough.exists()):
        with train.checkpoint_dir() as path:
            (path / mine).write_text(f"{step}\n" * 10_000)
            if step % 3 == 2:
                later = train.CheckpointUploadMode.ASYNC
                train.report({"step": step}, checkpoint=path, checkpoint_upload_mode=later)
            else:
                train.report({"step": step}, checkpoint=path)
                _append(folder / "acknowledged", step)
        step += 1
        time.sleep(STEP_SECONDS)
    return step


def _start_child(cache: dict[Any, Any], folder: Path) -> None:
    """Start what must not outlive the worker: a process in a session of its own."""
    if "child" not in cache:
        cache["child"] = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        _append(folder / "children", cache["child"].pid)


def _append(path: Path, number: int) -> None:
    with open(path, "a") as file:  # one short line at a time is not torn
        file.write(f"{number}\n")


def numbers(path: Path) -> list[int]:
    """Read what `_append` has written, also by a process that was killed meanwhile."""
    return [int(line) for line in path.read_text().split()] if path.exists() else []


def step_of(checkpoint: Path) -> int:
    """Load a checkpoint: every rank's file, whole and of the same step."""
    texts = [(checkpoint / f"rank_{rank}").read_text() for rank in range(WORKERS)]
    (text,) = set(texts)
    step = int(text.partition("\n")[0])
    assert text == f"{step}\n" * 10_000, f"{checkpoint} holds something else than step {step}"
    return step


if __name__ == "__main__":
    drive(Path(sys.argv[1]))
