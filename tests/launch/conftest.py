"""For tests of `drawbar launch`: the command, on the tests' own Ray."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest
import ray

from tests.train.conftest import Pipe, pipe, wait_until_gone

__all__ = ["Pipe", "pipe", "wait_until_gone"]


@dataclass(frozen=True)
class Launched:
    """What `drawbar launch` has done."""

    code: int
    out: bytes
    err: str
    run: Path

    def log(self, rank: int) -> str:
        return (self.run / f"logs/rank_{rank}.log").read_text(errors="replace")


class Launch:
    """`launch(source, *options)` writes a script, and launches it on two workers."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.script = folder / "script.py"

    def start(
        self, source: str, *options: str, script: tuple[str, ...] = (), **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start it; `script` is what stands behind the options if not the script alone."""
        self.script.write_text(textwrap.dedent(source))
        where = ["--address", ray.get_runtime_context().gcs_address]
        run = ["--storage-path", str(self.folder), "--name", "run"]
        if not {"--nproc_per_node=2", "--accelerate-config"} & set(options):
            run += ["--num-workers", "2"]
        command = [sys.executable, "-m", "drawbar.cli", "launch", *where, *run, *options]
        return subprocess.Popen(
            [*command, *(script or [str(self.script)])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.folder,
            env={**os.environ, **variables},
            start_new_session=True,
        )

    def __call__(
        self, source: str, *options: str, script: tuple[str, ...] = (), **variables: str
    ) -> Launched:
        with self.start(source, *options, script=script, **variables) as process:
            return self.ended(process)

    def ended(self, process: subprocess.Popen[bytes]) -> Launched:
        """Wait until the command has ended, and kill it if the test ends first."""
        try:
            out, err = process.communicate()
        except BaseException:
            process.kill()
            raise
        return Launched(
            process.returncode, out, err.decode(errors="surrogateescape"), self.folder / "run"
        )


@pytest.fixture
def launch(tmp_path: Path, ray_cluster: None) -> Launch:
    return Launch(tmp_path)
