"""Connection of fit() to Ray, and the environment of workers, on real clusters."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cloudpickle
import psutil
import pyarrow as pa
import pytest
import ray
from ray.cluster_utils import Cluster

from drawbar import train
from drawbar.cli import main as drawbar_command
from drawbar.train import (
    Backend,
    BackendConfig,
    DataParallelTrainer,
    Result,
    RunConfig,
    ScalingConfig,
)
from drawbar.train.backend import get_node_address, get_worker_address
from tests import _ray_compat
from tests._ray_compat import start_nodes_without_time_limits, wait_for_nodes

if TYPE_CHECKING:
    from tests.train.conftest import Drivers, Pipe

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests
cloudpickle.register_pickle_by_value(_ray_compat)

NO_TOKEN = {"RAY_AUTH_MODE": "disabled"}  # Ray's default depends on earlier clusters
RANK_VARIABLES = {
    "RANK": "get_world_rank",
    "WORLD_SIZE": "get_world_size",
    "LOCAL_RANK": "get_local_rank",
    "LOCAL_WORLD_SIZE": "get_local_world_size",
    "NODE_RANK": "get_node_rank",
}


def fit(function: Callable[[], Any], config: RunConfig, **options: Any) -> Result:
    options.setdefault("scaling_config", ScalingConfig(num_workers=2))
    return DataParallelTrainer(function, run_config=config, **options).fit()


def make_short_directory() -> tempfile.TemporaryDirectory[str]:
    """Create a directory whose path is short enough for Ray's sockets, unlike `tmp_path`.

    Some processes of Ray outlive their head by a minute and may still write there.
    """
    return tempfile.TemporaryDirectory(prefix="ray", dir="/tmp", ignore_cleanup_errors=True)


@pytest.fixture
def short_directory() -> Iterator[str]:
    with make_short_directory() as folder:
        yield folder


@pytest.mark.alone  # starts Ray several times
@pytest.mark.timeout(900)
def test_local_ray_is_shared_by_threads_and_ends_with_driver(
    tmp_path: Path,
    run_config: RunConfig,
    drivers: Drivers,
    pipe: Pipe,
    short_directory: str,
    wait_until_gone: Callable[..., None],
) -> None:
    def waiting() -> None:
        pipe.send(os.getpid())
        threading.Event().wait()

    def main() -> None:
        start_nodes_without_time_limits()

        def one_run(number: int) -> None:
            config = RunConfig(name=f"run_{number}", storage_path=str(tmp_path))
            is_local = number == 0  # needs Ray only for its table, and starts it for the split
            fit(
                lambda: train.report({"number": number}),
                config,
                datasets={"train": pa.table({"x": [1, 2]})} if is_local else None,
                scaling_config=ScalingConfig(num_workers=0 if is_local else 1),
            )

        for numbers in ((0,), (1, 2), (3,)):  # the thread that started Ray has ended by then
            threads = [threading.Thread(target=one_run, args=(number,)) for number in numbers]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        fit(waiting, run_config, scaling_config=ScalingConfig(num_workers=1))

    env_vars = {"RAY_ADDRESS": None, "RAY_TMPDIR": short_directory, "RAY_AUTH_MODE": None}
    with drivers(main, **env_vars) as driver:
        worker = int(pipe.receive()[0])
        assert driver.stderr is not None
        shown = driver.stderr.readline()
        assert os.listdir(short_directory) == ["ray"]
        driver.kill()
        wait_until_gone([worker])
    assert re.match(r"\[drawbar [\d:]+\] run directory", shown)  # Ray prints nothing before it
    metrics = [Result.from_path(tmp_path / f"run_{number}").metrics for number in range(4)]
    assert metrics == [{"number": number} for number in range(4)]


@pytest.fixture(scope="module")
def bare_cluster() -> Iterator[str]:
    """Address of a cluster that was started by hand, with a minimal environment."""
    with make_short_directory() as folder:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block"]
        command += ["--port=0", f"--temp-dir={folder}", "--include-dashboard=false"]
        environ = {name: os.environ[name] for name in ("PATH", "HOME")} | NO_TOKEN
        with subprocess.Popen(
            [*command, "--num-cpus=8", "--disable-usage-stats"],
            env=environ,
            stdout=subprocess.PIPE,
            text=True,
        ) as head:
            assert head.stdout is not None
            assert any("Ray runtime started" in line for line in head.stdout)
            processes = psutil.Process(head.pid).children(recursive=True)
            yield Path(folder, "ray_current_cluster").read_text().strip()
            head.terminate()
            _, alive = psutil.wait_procs(processes, timeout=300)
            for process in alive:
                process.kill()


@pytest.fixture(scope="module")
def environments(
    bare_cluster: str, drivers: Drivers, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Environment of each rank, in a run whose driver has variables, a directory, and a module."""
    project = tmp_path_factory.mktemp("project")
    (project / "beside.py").write_text("VALUE = 'imported'")
    (project / "table.csv").write_text("read")

    def get_environment() -> Any:
        import beside  # type: ignore[import-not-found]

        context = train.get_context()
        return {
            "environ": dict(os.environ),
            "ranks": {name: getattr(context, get)() for name, get in RANK_VARIABLES.items()},
            "module": beside.VALUE,
            "file": Path("table.csv").read_text(),
            "addresses": [get_worker_address(), get_node_address()],
        }

    def main() -> None:
        sys.path.insert(0, str(project))  # as for a script in this directory
        os.chdir(project)
        scaling = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 4})
        config = RunConfig(name="run", storage_path=project, forward_env=["MY_*"])
        result = fit(get_environment, config, scaling_config=scaling)
        assert ray.get_runtime_context().gcs_address == bare_cluster
        (node,) = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has no types here
        seen = [values | {"node": node["NodeManagerAddress"]} for values in result.return_values]
        (project / "seen.json").write_text(json.dumps(seen))

    drivers.run(
        main,
        **NO_TOKEN,
        RAY_ADDRESS=bare_cluster,
        RAY_OF_THE_DRIVER="not for the workers",
        CUDA_VISIBLE_DEVICES="7",
        MLFLOW_TRACKING_URI="http://tracker",
        MY_SETTING="mine",
        OTHERS_SETTING="not named",
    )
    environments: list[dict[str, Any]] = json.loads((project / "seen.json").read_text())
    assert len(environments) == 2
    return environments


@pytest.fixture(params=[0, 1])
def worker(environments: list[dict[str, Any]], request: pytest.FixtureRequest) -> dict[str, Any]:
    rank: int = request.param
    return environments[rank]


def test_worker_env_has_forwarded_variables(worker: dict[str, Any]) -> None:
    assert worker["environ"]["MLFLOW_TRACKING_URI"] == "http://tracker"
    assert worker["environ"]["MY_SETTING"] == "mine"
    assert worker["environ"].get("CUDA_VISIBLE_DEVICES") != "7"
    assert not {"RAY_OF_THE_DRIVER", "OTHERS_SETTING"} & worker["environ"].keys()


def test_worker_env_has_directory_and_modules(worker: dict[str, Any]) -> None:
    assert worker["file"] == "read"
    assert worker["module"] == "imported"


def test_worker_env_limits_threads_to_cpus(worker: dict[str, Any]) -> None:
    # A quota of the container may be lower, which `tests/train/worker/test_environment.py` tests.
    most = min(4, len(os.sched_getaffinity(0)))
    assert 1 <= int(worker["environ"]["OMP_NUM_THREADS"]) <= most


def test_worker_env_has_torchrun_variables(worker: dict[str, Any]) -> None:
    assert {name: int(worker["environ"][name]) for name in RANK_VARIABLES} == worker["ranks"]


def test_worker_address_on_one_node_is_loopback(worker: dict[str, Any]) -> None:
    assert worker["addresses"] == ["127.0.0.1", worker["node"]]


def test_worker_address_outside_training_function_raises() -> None:
    with pytest.raises(RuntimeError):
        get_worker_address()


ENDED_CLUSTER_SCRIPT = """
from drawbar import train

try:
    train.attach("run")
except LookupError as error:
    print(error)

train.DataParallelTrainer(
    lambda: print("trained"),
    scaling_config=train.ScalingConfig(num_workers=1),
    run_config=train.RunConfig(name="run", storage_path="."),
).fit()
"""


def test_address_of_ended_cluster_is_ignored(short_directory: str) -> None:
    # `ray start` leaves this file if it is killed. Ray itself then waits for the cluster.
    recorded = Path(short_directory, "ray", "ray_current_cluster")
    recorded.parent.mkdir()
    recorded.write_text("127.0.0.1:1")
    env = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    script = subprocess.run(
        [sys.executable, "-c", ENDED_CLUSTER_SCRIPT],
        cwd=short_directory,
        env=env | NO_TOKEN | {"RAY_TMPDIR": short_directory},
        capture_output=True,
        text=True,
    )
    assert script.returncode == 0, script.stderr
    assert "No Ray cluster at 127.0.0.1:1" in script.stdout
    assert "trained" in script.stdout


class SharingBackend(Backend):
    share_cuda_visible_devices = True


class SharingConfig(BackendConfig):
    backend_cls = SharingBackend


@pytest.mark.usefixtures("ray_cluster")
def test_shared_cuda_devices_list_all_gpus(run_config: RunConfig) -> None:
    def function() -> tuple[str, tuple[str, ...]]:
        return os.environ["CUDA_VISIBLE_DEVICES"], train.get_context().get_accelerator_ids()

    scaling = ScalingConfig(num_workers=2, use_gpu=True)
    values = fit(
        function, run_config, scaling_config=scaling, backend_config=SharingConfig()
    ).return_values
    gpu_ids = [ids for _, ids in values]
    assert gpu_ids == sorted(gpu_ids)
    assert len({*gpu_ids[0], *gpu_ids[1]}) == 2
    assert [visible for visible, _ in values] == [",".join([*gpu_ids[0], *gpu_ids[1]])] * 2


WHERE_SCRIPT = """
import os, sys
names = "GROUP_RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE"
with open(f"{sys.argv[1]}/{os.environ['RANK']}", "w") as file:
    file.write(" ".join(os.environ[name] for name in names))
"""


def run_trial_on_far_node(folder: Path) -> dict[str, Any]:
    """Run a trial of Ray Tune with a worker on the far node and return its last metrics."""
    from ray import tune

    def function() -> None:
        node = ray.get_runtime_context().get_node_id()
        train.report({"argv": sys.argv[1:], "set": os.environ.get("HF_SET_LATE"), "node": node})

    sys.argv = ["sweep.py", "--fast"]
    os.environ["HF_SET_LATE"] = "1"  # after the start of Ray
    scaling = ScalingConfig(num_workers=1, resources_per_worker={"far": 1})
    trainable = DataParallelTrainer(function, scaling_config=scaling).as_trainable()
    run_config = tune.RunConfig(storage_path=str(folder), verbose=0)
    return dict(tune.Tuner(trainable, run_config=run_config).fit()[0].metrics or {})


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_ranks_on_two_nodes_are_contiguous_and_trials_get_env(
    run_config: RunConfig, tmp_path: Path, drivers: Drivers, short_directory: str
) -> None:
    def where() -> tuple[str, int, int, int]:
        context = train.get_context()
        node = ray.get_runtime_context().get_node_id()
        ranks = context.get_node_rank(), context.get_local_rank(), context.get_local_world_size()
        return node, *ranks

    def main() -> None:
        start_nodes_without_time_limits()
        head = {"num_cpus": 2, "include_dashboard": False, "no_monitor": True}
        cluster = Cluster(initialize_head=True, head_node_args=head)
        far = cluster.add_node(wait=False, num_cpus=2, resources={"far": 1})
        wait_for_nodes(cluster)
        ray.init(address=cluster.address)
        values = fit(where, run_config, scaling_config=ScalingConfig(num_workers=4)).return_values
        (tmp_path / "script.py").write_text(WHERE_SCRIPT)
        command = ["launch", "--nnodes", "2", "--nproc-per-node", "2", "--storage-path"]
        with pytest.raises(SystemExit) as ended:
            drawbar_command([*command, str(tmp_path), str(tmp_path / "script.py"), str(tmp_path)])
        assert ended.value.code == 0
        metrics = run_trial_on_far_node(tmp_path)
        trial = metrics["node"] == far.node_id, metrics["argv"], metrics["set"]
        (tmp_path / "where.json").write_text(json.dumps([values, trial]))
        ray.shutdown()
        cluster.shutdown()  # type: ignore[no-untyped-call]  # Ray has no types here

    drivers.run(main, RAY_ADDRESS=None, RAY_TMPDIR=short_directory)
    ranks_by_worker, trial = json.loads((tmp_path / "where.json").read_text())
    nodes = [node for node, *_ in ranks_by_worker]
    assert nodes[0] == nodes[1] != nodes[2] == nodes[3]
    assert [ranks for _, *ranks in ranks_by_worker] == [
        [0, 0, 2],
        [0, 1, 2],
        [1, 0, 2],
        [1, 1, 2],
    ]
    env_vars = [(tmp_path / str(rank)).read_text() for rank in range(4)]
    assert env_vars == ["0 0 2 4", "0 1 2 4", "1 0 2 4", "1 1 2 4"]
    assert trial == [True, ["--fast"], "1"]
