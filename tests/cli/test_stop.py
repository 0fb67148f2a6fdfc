"""Tests of `drawbar stop` for runs in other processes."""

from __future__ import annotations

import hashlib
import json
import os
import socketserver
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import pytest

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, ScalingConfig
from tests.cli.conftest import Command


def train_until_stopped() -> None:
    while not train.should_checkpoint():
        train.report({"loss": 0.5})
    with train.checkpoint_dir() as path:
        (path / "model").write_text("weights")
        train.report({"loss": 0.5}, checkpoint=path)


def test_stop_ends_run_after_next_checkpoint(cli: Command, tmp_path: Path) -> None:
    run = DataParallelTrainer(
        train_until_stopped,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=tmp_path),
    ).start()
    command = [sys.executable, "-m", "drawbar.cli", "stop", run.path]
    assert subprocess.check_output(command, text=True).startswith("Stopping run 'run'.")
    result = run.wait()
    assert result.checkpoint is not None
    assert cli("show", run.path).out.startswith("run  stopped\n")
    refused = cli("stacks", run.path)
    assert (refused.code, "'run' has ended (stopped)" in refused.err) == (2, True)


def test_stop_of_ended_run_reports_status_without_ray(
    cli: Command,
    interrupted_run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))  # without a default storage
    monkeypatch.chdir(interrupted_run.parent)
    stopped = json.loads(cli("stop", "short", "--json").out)
    assert (stopped["status"], Path(stopped["path"]).name) == ("finished", "short")
    assert cli("stop", "short").out == "Run 'short' has already ended: finished.\n"
    for name in ("long", interrupted_run):
        result = cli("stop", name)
        assert (result.code, result.out, result.err.count("\n")) == (2, "", 1)
        assert "and its host process died" in result.err
        assert "detached runs" not in result.err


class OtherVersion(socketserver.StreamRequestHandler):
    """Replies of a Drawbar version that cannot stop runs."""

    def handle(self) -> None:
        if self.rfile.readline() == b"follow\n":
            self.rfile.read()  # until the client closes the connection
        else:
            self.wfile.write(b'{"error": "another version"}\n')


class QuietServer(socketserver.ThreadingUnixStreamServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing if the command has closed its connection early."""


def test_stop_of_run_that_replies_with_error_prints_one_line(
    cli: Command, interrupted_run: Path
) -> None:
    sockets = Path(tempfile.gettempdir()) / f"drawbar-{os.geteuid()}"
    sockets.mkdir(mode=0o700, exist_ok=True)
    digest = hashlib.sha256(os.fsencode(interrupted_run.resolve())).hexdigest()[:16]
    path = sockets / f"run_{digest}_0.sock"
    with QuietServer(str(path), OtherVersion) as server:
        server.daemon_threads = True  # the handle of the command may keep its connection open
        threading.Thread(target=server.serve_forever).start()
        result = cli("stop", interrupted_run)
        server.shutdown()
    path.unlink()
    assert (result.code, result.out) == (2, "")
    # Other threads of this process may print, too.
    assert f"drawbar: error: run 'long' in {interrupted_run}: another version" in result.err
    assert "Traceback" not in result.err


@pytest.mark.usefixtures("ray_cluster")
def test_stop_of_unknown_name_suggests_nearest_name(cli: Command, storage: Path) -> None:
    for command in ("stop", "stacks"):
        result = cli(command, storage / "shart")
        assert (result.code, result.err.count("\n")) == (2, 1)
        assert result.err.endswith("Similar names: short.\n")


@pytest.mark.usefixtures("ray_cluster")
def test_attach_finds_run_in_default_storage_path(
    shared_storage: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DRAWBAR_STORAGE", str(shared_storage))
    assert train.attach("short").path == str(shared_storage / "short")
    with pytest.raises(LookupError, match=r"contains no ended run \(similar names: short\)"):
        train.attach("shrot")
