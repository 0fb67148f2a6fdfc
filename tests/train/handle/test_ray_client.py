"""`fit()` in a Ray Client: a real cluster with its client server, and real clients."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil
import pytest
import ray

from drawbar import train
from drawbar.train import (
    DataParallelTrainer,
    InsufficientResourcesError,
    RunConfig,
    ScalingConfig,
    UserAbort,
    UserCallback,
    WorkerGroupError,
)

if TYPE_CHECKING:
    from tests.train.conftest import Drivers, Pipe

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}  # Ray's default depends on earlier clusters
# The server forks a process per client, which gRPC's own handlers may break.
NO_FORK_HANDLERS = {"GRPC_ENABLE_FORK_SUPPORT": "0"}


def free_port() -> int:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        port: int = bound.getsockname()[1]
        return port


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of a client server on a cluster that was started by hand."""
    with tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True) as temp:
        port = free_port()
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += ["--port=0", f"--temp-dir={temp}", "--include-dashboard=false"]
        command += ["--num-cpus=4", "--disable-usage-stats", f"--ray-client-server-port={port}"]
        with subprocess.Popen(
            command, env=os.environ | NO_TOKEN | NO_FORK_HANDLERS, stdout=subprocess.PIPE, text=True
        ) as head:
            assert head.stdout is not None
            assert any("Ray runtime started" in line for line in head.stdout)
            yield f"ray://127.0.0.1:{port}"
            processes = psutil.Process(head.pid).children(recursive=True)
            head.terminate()
            _, alive = psutil.wait_procs(processes, timeout=300)
            for process in alive:
                process.kill()


class SendsHostPid(UserCallback):
    def __init__(self, pipe: Pipe) -> None:
        self._pipe = pipe

    def after_report(self, *_: Any) -> None:
        self._pipe.send("host", os.getpid())


def trainer(
    function: Callable[[], Any], storage: Path, name: str, *, num_workers: int = 1, **options: Any
) -> DataParallelTrainer:
    return DataParallelTrainer(
        function,
        scaling_config=ScalingConfig(num_workers=num_workers),
        run_config=RunConfig(name=name, storage_path=storage, **options),
    )


def train_forever(pipe: Pipe) -> Callable[[], None]:
    def function() -> None:
        train.report({"step": 0})
        pipe.send("worker", os.getpid())
        while True:
            threading.Event().wait(0.01)

    return function


class Named:
    def hello(self) -> str:
        return "hello"


def check_objects_and_actors(storage: Path) -> None:
    """Check that a function can use the client's objects and actors, and the client its objects."""
    captured = ray.put("captured")
    named: Any = ray.remote(Named).options(name="named").remote()

    def function() -> Any:
        by_name: Any = ray.get_actor("named")
        values = ray.get([captured, named.hello.remote(), by_name.hello.remote()])
        return [*values, ray.put("created")]

    *values, reference = trainer(function, storage, "objects").fit().return_value
    assert values == ["captured", "hello", "hello"]
    assert ray.get(reference) == "created"


def test_ray_client_fit_returns_results_and_objects(
    server: str, tmp_path: Path, drivers: Drivers
) -> None:
    def function() -> int:
        rank = train.get_context().get_world_rank()
        print("printed by", rank)
        with train.checkpoint_dir() as path:
            (path / "file").write_text("saved")
            train.report({"step": 1}, checkpoint=path)
        return rank * 10

    def failing() -> None:
        raise ArithmeticError("boom")

    def main() -> None:
        ray.init(server, namespace="mine")
        check_objects_and_actors(tmp_path)
        result = trainer(function, tmp_path, "run", num_workers=2).fit()
        assert result.return_values == [0, 10]
        assert result.metrics == {"step": 1}
        assert result.checkpoint is not None
        assert (Path(result.checkpoint) / "file").read_text() == "saved"
        assert len(result.metrics_dataframe) == 2
        with pytest.raises(WorkerGroupError, match="ArithmeticError: boom") as raised:
            trainer(failing, tmp_path, "failing").fit()
        first, *_ = raised.value.worker_failures.values()
        assert isinstance(first, ArithmeticError)
        with pytest.raises(InsufficientResourcesError, match="99 workers"):
            trainer(function, tmp_path, "large", num_workers=99).fit()
        assert trainer(
            lambda: os.getpid(), tmp_path, "here", num_workers=0
        ).fit().return_values == [os.getpid()]

    out, err = drivers.run(main, **NO_TOKEN)
    assert "printed by 0" in out
    assert "] running on 2 workers" in err


@pytest.mark.nightly
def test_ray_client_ctrl_c_stops_run_but_not_detached_run(
    server: str,
    tmp_path: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
) -> None:
    function = train_forever(pipe)

    def main() -> None:
        ray.init(server)
        trainer(function, tmp_path, "detached", detached=True).start()
        try:
            trainer(function, tmp_path, "run").fit()
        except UserAbort as abort:
            print(abort)

    def attach() -> None:
        ray.init(server)
        run = train.attach("detached")
        assert run.metrics == {"step": 0}
        run.stop(save=False)
        run.wait()
        print(run.status)

    with drivers(main, **NO_TOKEN) as driver:
        pids = [int(pipe.receive()[1]) for _ in range(2)]
        driver.send_signal(signal.SIGINT)
        out, err = driver.communicate(timeout=300)
    assert driver.returncode == 0, err
    assert "To resume from the latest checkpoint" in out
    assert drivers.run(attach, **NO_TOKEN)[0].splitlines()[-1] == "stopped"
    wait_until_gone(pids)


@pytest.mark.nightly
def test_ray_client_sigkill_ends_run(
    server: str,
    tmp_path: Path,
    drivers: Drivers,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
) -> None:
    function, callback = train_forever(pipe), SendsHostPid(pipe)

    def main() -> None:
        ray.init(server)
        trainer(function, tmp_path, "run", callbacks=[callback]).fit()

    with drivers(main, **NO_TOKEN) as driver:
        pids = [int(pipe.receive()[1]) for _ in range(2)]
        driver.kill()
        wait_until_gone(pids, seconds=15)  # Ray itself waits 30 s for a client
