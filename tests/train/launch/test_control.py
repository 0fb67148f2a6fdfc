"""The sockets by which runs are reached."""

from __future__ import annotations

import socket
import tempfile
from pathlib import Path

import pytest

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig
from drawbar.train._storage.shared_copy import own_folder


def test_a_start_removes_the_sockets_of_processes_that_were_killed(
    run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sockets() -> list[str]:
        assert train.attach(tmp_path / "run").status == "running"
        return sorted(path.name for path in own_folder().iterdir())

    with (
        tempfile.TemporaryDirectory() as short,  # as a socket's path must be
        socket.socket(socket.AF_UNIX) as gone,
        socket.socket(socket.AF_UNIX) as there,
    ):
        monkeypatch.setattr(tempfile, "tempdir", short)
        gone.bind(str(own_folder() / "run_gone.sock"))
        there.bind(str(own_folder() / "run_there.sock"))
        there.listen()
        result = DataParallelTrainer(
            sockets, scaling_config=ScalingConfig(num_workers=0), run_config=run_config
        ).fit()
        ((own, other),) = result.return_values
        assert (own.partition("_")[0], other) == ("run", "run_there.sock")
        assert [path.name for path in own_folder().iterdir()] == [other]
