"""Fixtures that run `drawbar launch` without Ray, and on the Ray cluster of the tests."""

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

CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Launched:
    """Result of a `drawbar launch` command."""

    code: int
    out: bytes
    err: str
    run: Path

    def log(self, rank: int) -> str:
        return (self.run / f"logs/rank_{rank}.log").read_text(errors="replace")


class Launch:
    """Callable `launch(source, *options)` that launches a script on two workers.

    Args:
        directory: Directory of the script and of the run.
        address: Ray cluster to use. Default: none.
    """

    def __init__(self, directory: Path, address: str | None = None) -> None:
        self.directory = directory
        self._address = ["--address", address] if address else []
        self.uses_ray = address is not None
        self.script = directory / "script.py"
        self.num_workers: int | None = 2

    def start(
        self, source: str, *options: str, script: tuple[str, ...] = (), **variables: str
    ) -> subprocess.Popen[bytes]:
        """Start the command.

        Args:
            source: Source code of the script.
            options: Command-line options.
            script: Arguments after the options. Default: the path of the script.
            variables: Additional environment variables.
        """
        self.script.write_text(textwrap.dedent(source))
        run = ["--storage-path", str(self.directory), "--name", "run"]
        if self.num_workers and "--nproc_per_node=2" not in options:
            run += ["--num-workers", str(self.num_workers)]
        command = [sys.executable, "-m", "drawbar.cli", "launch", *self._address, *run, *options]
        return subprocess.Popen(
            [*command, *(script or [str(self.script)])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=self.directory,
            # A Ray that happens to run on this machine has its address file in another directory.
            env={**os.environ, "RAY_TMPDIR": str(self.directory), **variables},
            start_new_session=True,
        )

    def __call__(
        self, source: str, *options: str, script: tuple[str, ...] = (), **variables: str
    ) -> Launched:
        with self.start(source, *options, script=script, **variables) as process:
            return self.wait_for_end(process)

    def wait_for_end(self, process: subprocess.Popen[bytes]) -> Launched:
        """Wait until the command has ended, and kill it if the test ends first."""
        try:
            out, err = process.communicate()
        except BaseException:
            process.kill()
            raise
        return Launched(
            process.returncode, out, err.decode(errors="surrogateescape"), self.directory / "run"
        )


@pytest.fixture
def launch(tmp_path: Path) -> Launch:
    return Launch(tmp_path)


@pytest.fixture(params=["local", pytest.param("ray", marks=pytest.mark.nightly)])
def any_launch(request: pytest.FixtureRequest, tmp_path: Path) -> Launch:
    """Without Ray, and with Ray workers."""
    if request.param == "local":
        return Launch(tmp_path)
    request.getfixturevalue("ray_cluster")
    return Launch(tmp_path, ray.get_runtime_context().gcs_address)


@pytest.fixture
def ray_launch(tmp_path: Path, ray_cluster: None) -> Launch:
    return Launch(tmp_path, ray.get_runtime_context().gcs_address)
