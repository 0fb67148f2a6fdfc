"""Shared by all tests: one Ray per test process, and a place for runs."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import ray

from drawbar.train import RunConfig
from tests.ray_start import wait_for_started_nodes


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the seed of tests/train/test_chaos.py be set: the one that it printed when it failed."""
    parser.addoption("--chaos-seed", type=int, default=secrets.randbelow(10**6))


def pytest_configure() -> None:
    """Have Ctrl-C end the tests' processes, which ignore it if a shell runs pytest with `&`.

    Threads of OpenMP that wait for their next piece of work sleep: by default they spin, and take
    the cores from the tests beside them.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


@pytest.fixture(scope="session", autouse=True)
def _the_environment_stays() -> None:
    """Keep Accelerate from clearing and refilling this process's environment.

    It does so for each `Accelerator`, to learn what its settings are by default. The C library
    frees the table of variables meanwhile, and a native thread that reads one, as those of Ray do
    to find their time zone, may end the process by SIGSEGV: seen once, under load.
    """
    if "accelerate" in sys.modules:
        from accelerate.utils import environment

        environment.clear_environment = _without_its_variables


@contextlib.contextmanager
def _without_its_variables() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """One local Ray with 8 logical CPUs and 4 logical GPUs, whatever the machine has.

    Each process of pytest-xdist has its own.
    """
    # Else Ray's log monitor lists the logs of all workers ten times a second instead of twice.
    os.environ["RAY_LOG_MONITOR_MANY_FILES_THRESHOLD"] = "0"
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "600")  # a busy machine needs longer
    wait_for_started_nodes()
    ray.init(
        address="local",  # never one that happens to run on this machine
        num_cpus=8,
        num_gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))) or 4,  # real ones, or logical
        include_dashboard=False,
        object_store_memory=512 * 2**20,  # several Rays share the memory
        logging_level=logging.ERROR,
        # What workers of other tests say would come into this one's output, at any time.
        log_to_driver=False,
    )
    yield
    ray.shutdown()


@pytest.fixture
def run_config(tmp_path: Path) -> RunConfig:
    """Put the run below the test's own folder, under the name `run`."""
    return RunConfig(name="run", storage_path=tmp_path)


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """`torchrun(function, processes=2)`: rank 0's value, without Ray and without Drawbar."""

    def torchrun(function: Callable[[], Any], processes: int = 2) -> Any:
        folder = tmp_path_factory.mktemp("torchrun")
        (folder / "function.pkl").write_bytes(cloudpickle.dumps(function))
        (folder / "script.py").write_text(TORCHRUN_SCRIPT)
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        script = [str(folder / "script.py"), str(folder)]
        environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
        subprocess.run(
            [*launcher, "--nproc-per-node", str(processes), *script],
            env={**environment, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"},
            check=True,
        )
        return pickle.loads((folder / "value.pkl").read_bytes())

    return torchrun


TORCHRUN_SCRIPT = """
import os, pathlib, pickle, sys
sys.modules["drawbar"] = None  # importing it fails
folder = pathlib.Path(sys.argv[1])
value = pickle.loads((folder / "function.pkl").read_bytes())()
if os.environ["RANK"] == "0":
    (folder / "value.pkl").write_bytes(pickle.dumps(value))
# What still refers to the process group keeps gloo's threads; one that frees a tensor while Python
# ends aborts the process (pytorch/pytorch#179291). So Python does not end here.
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
"""
