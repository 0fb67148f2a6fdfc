"""Control sockets of runs."""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

import pytest

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig
from tests.train.conftest import lowest_free_file_descriptor, no_free_file_descriptor


def get_socket_directory() -> Path:
    """Return the directory of sockets, which only this user can enter."""
    return Path(tempfile.gettempdir()) / f"drawbar-{os.geteuid()}"


def test_control_socket_start_removes_dead_sockets(
    run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sockets() -> list[str]:
        assert train.attach(tmp_path / "run").status == "running"
        return sorted(path.name for path in get_socket_directory().iterdir())

    with (
        tempfile.TemporaryDirectory() as short,  # socket paths must be short
        socket.socket(socket.AF_UNIX) as dead,
        socket.socket(socket.AF_UNIX) as live,
    ):
        monkeypatch.setattr(tempfile, "tempdir", short)
        get_socket_directory().mkdir(mode=0o700)
        dead.bind(str(get_socket_directory() / "run_dead.sock"))
        live.bind(str(get_socket_directory() / "run_live.sock"))
        live.listen()
        result = DataParallelTrainer(
            sockets, scaling_config=ScalingConfig(num_workers=0), run_config=run_config
        ).fit()
        ((run_socket, other),) = result.return_values
        assert (run_socket.partition("_")[0], other) == ("run", "run_live.sock")
        assert [path.name for path in get_socket_directory().iterdir()] == [other]


def test_control_socket_replies_again_after_file_descriptors_ran_out(
    run_config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reply() -> bytes:
        (path,) = get_socket_directory().glob("run_*.sock")
        with socket.socket(socket.AF_UNIX) as connection:
            lowest = lowest_free_file_descriptor()
            with no_free_file_descriptor(lowest) as wait_until_accept_failed:
                connection.connect(str(path))  # the reserved descriptor is used, and the next fails
                wait_until_accept_failed()
        with socket.socket(socket.AF_UNIX) as connection:
            connection.connect(str(path))
            connection.sendall(b"diagnose\n")
            connection.settimeout(60)
            return connection.recv(1 << 16)

    with tempfile.TemporaryDirectory() as short:  # socket paths must be short
        monkeypatch.setattr(tempfile, "tempdir", short)
        result = DataParallelTrainer(
            reply, scaling_config=ScalingConfig(num_workers=0), run_config=run_config
        ).fit()
    assert b'"error":""' in result.return_value
