"""Commands to a rank that runs several attempts in one process."""

from __future__ import annotations

from pathlib import Path

from drawbar.train._protocol.assignment import Ranks, WorkerAssignment, WorkerSpec
from drawbar.train._protocol.commands import CommitCompleted
from drawbar.train._protocol.messages import Message
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._worker.rank_runner import RankRunner


def make_assignment(path: Path, attempt: int) -> WorkerAssignment:
    return WorkerAssignment(
        spec=WorkerSpec(env_vars={}, driver_env=None, metadata={}),
        run_id="r",
        run_directory=RunDirectory(path),
        attempt=attempt,
        first_report_index=0,
        ranks=Ranks(
            world_rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            node_rank=0,
            num_nodes=1,
        ),
    )


def test_command_of_earlier_attempt_is_ignored(tmp_path: Path) -> None:
    runner = RankRunner()
    messages: list[Message] = []
    command = CommitCompleted(report_index=0, checkpoint_name="checkpoint_000000")
    runner.handle_command(command, attempt=0)  # before the first attempt
    for attempt in (0, 1):
        session = runner.start_attempt(make_assignment(tmp_path, attempt), messages.append)
    runner.handle_command(command, attempt=0)
    assert session.checkpoint is None
    runner.handle_command(command, attempt=1)
    assert session.checkpoint is not None
