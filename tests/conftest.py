"""Shared fixtures: one Ray per test process, temporary storage, and shorter periods and sizes."""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import secrets
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import ray

from drawbar._records import report_log
from drawbar._storage import journal_file, retries
from drawbar.train import RunConfig
from drawbar.train._controller import recovery
from tests._ray_compat import start_nodes_without_time_limits

TORCH_MODULES = ["torch", "torch._dynamo", "torch.distributed.checkpoint", "drawbar.torch"]
BOOSTING_MODULES = ["xgboost", "lightgbm", "sklearn.utils", "pandas", "drawbar.train"]
TRANSFORMERS_MODULES = [
    *TORCH_MODULES,
    *("transformers.trainer", "drawbar.transformers", "drawbar.accelerate", "drawbar.lightning"),
]


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add an option for the seed of tests/train/test_chaos.py, which a failed test prints."""
    parser.addoption("--chaos-seed", type=int, default=secrets.randbelow(10**6))


def pytest_configure() -> None:
    """Let Ctrl-C end the test processes, which ignore it if a shell runs pytest with `&`.

    Idle OpenMP threads sleep: by default they spin and take cores from concurrent tests.
    """
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    # Otherwise each Ray starts a worker process per core that most tests do not use.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Each test has another function, so a fork server with its imports would serve few workers.
    # Workers of all tests are forked from one server without frameworks, which saves a fifth of
    # the CPU time. tests/train/driver and tests/train/worker start workers without it.
    os.environ.setdefault("DRAWBAR_FORKSERVER_PRELOAD", "drawbar.train")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the ten slowest files."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration  # type: ignore[assignment]  # a float
    terminalreporter.section("slowest files")
    for file, duration in seconds.most_common(10):
        terminalreporter.write_line(f"{duration:6.1f} s  {file}")


@pytest.fixture(scope="module")
def keep_environment() -> Iterator[None]:
    """Prevent Accelerate from clearing and refilling this process's environment.

    Accelerate does so for each `Accelerator` to find its default settings. The C library then frees
    the table of variables. A native thread that reads a variable at that moment, as Ray's threads
    do for the time zone, may crash with SIGSEGV. Training functions run in this process in local
    mode only, so tests that create an `Accelerator` there use this fixture.
    """
    from accelerate.utils import environment

    @contextlib.contextmanager
    def clear_accelerate_variables() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in [name for name in os.environ if name.startswith("ACCELERATE_")]:
                patch.delenv(name)
            yield

    with pytest.MonkeyPatch.context() as patch:
        # Older versions of Accelerate do not have it in this module.
        patch.setattr(environment, "clear_environment", clear_accelerate_variables, raising=False)
        yield


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """Start one local Ray with 8 logical CPUs and at least 4 logical GPUs on any machine.

    Each process of pytest-xdist has its own.
    """
    # Otherwise, Ray's log monitor lists all logs ten times a second instead of twice.
    os.environ["RAY_LOG_MONITOR_MANY_FILES_THRESHOLD"] = "0"
    os.environ.setdefault("RAY_gcs_server_port_wait_time_s", "600")  # a busy machine needs longer
    start_nodes_without_time_limits()
    with pytest.MonkeyPatch.context() as patch:
        # Nobody reads what Ray's log monitor publishes, so it need not find new logs.
        patch.setenv("LOG_NAME_UPDATE_INTERVAL_S", "86400")
        ray.init(
            address="local",  # never one that happens to run on this machine
            num_cpus=8,
            num_gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))) or 4,  # real ones, or logical
            include_dashboard=False,
            object_store_memory=512 * 2**20,  # several Rays share the memory
            logging_level=logging.ERROR,
            # Output of workers of other tests would appear in the output of this test at any time.
            log_to_driver=False,
        )
    yield
    ray.shutdown()


@contextlib.contextmanager
def _preload(*modules: str) -> Iterator[None]:
    """Fork workers from a process that has imported these modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DRAWBAR_FORKSERVER_PRELOAD", ",".join(modules))
        yield


@pytest.fixture(scope="module")
def preload_torch() -> Iterator[None]:
    """Fork workers from a process that has imported torch, which takes seconds in each worker."""
    with _preload(*TORCH_MODULES):
        yield


@pytest.fixture(scope="module")
def preload_transformers() -> Iterator[None]:
    """As `preload_torch`, with Transformers, Accelerate, and Lightning."""
    with _preload(*TRANSFORMERS_MODULES):
        yield


@pytest.fixture(scope="module")
def preload_boosting() -> Iterator[None]:
    """As `preload_torch`, with XGBoost and LightGBM."""
    with _preload(*BOOSTING_MODULES):
        yield


@pytest.fixture(scope="module")
def start_without_fork_server() -> Iterator[None]:
    """Let each worker import its modules itself."""
    with _preload():
        yield


@pytest.fixture(scope="module")
def patient_restarts() -> Iterator[None]:
    """Keep workers that take long to stop on a busy machine, instead of replacing them."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(recovery, "RESTART_GRACE_SECONDS", 60)
        yield


@pytest.fixture
def quick_retries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep work directories in the test's directory, and shorten retry delays."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(retries, "INITIAL_DELAY_S", 0.001)


@pytest.fixture
def early_slow_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warn of operations of storage that take longer than 0.01 s."""
    monkeypatch.setattr(retries, "SLOW_WARNING_PERIOD_S", 0.01)


@pytest.fixture
def small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Close segments of reports, and upload parts of the journal, after 1000 bytes."""
    monkeypatch.setattr(report_log, "SEGMENT_BYTES", 1000)
    monkeypatch.setattr(journal_file, "PART_BYTES", 1000)


@pytest.fixture
def run_config(tmp_path: Path) -> RunConfig:
    """Return a config for a run named `run` in the temporary directory of the test."""
    return RunConfig(name="run", storage_path=tmp_path)


@pytest.fixture(scope="session")
def torchrun(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Return a function that runs a function under torchrun and returns the value of rank 0."""

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
