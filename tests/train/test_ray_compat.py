"""Private APIs of Ray: each test fails when Ray changes what `_ray_compat` uses.

`test_placement.py`, `test_nodes.py`, and `tests/train/data` use the rest.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pytest
import ray
import ray.data
from ray._private import state, worker
from ray._private.runtime_env.context import RuntimeEnvContext

from drawbar._base import ray_compat as _ray_compat
from drawbar._fork_server import client
from drawbar._modes.cluster_checks import check_cluster_fits
from drawbar.train import InsufficientResourcesError, ScalingConfig

pytestmark = pytest.mark.usefixtures("ray_cluster")
RAY_VERSION = tuple(map(int, ray.__version__.split(".")[:2]))


class Actor:
    def worker_id(self) -> str:
        return str(ray.get_runtime_context().get_worker_id())


make_actor: Any = ray.remote(num_cpus=0)(Actor)


def test_actor_is_described_and_its_death_is_known() -> None:
    actor = make_actor.remote()
    worker_id = ray.get(actor.worker_id.remote())
    info = _ray_compat.get_actor_info(_ray_compat.get_actor_id(actor))
    assert info["Pid"] > 0
    assert "IPAddress" in info["Address"]
    assert info["ActorClassName"].endswith("Actor")
    assert not _ray_compat.is_worker_process_dead(worker_id)
    # The function returns False if Ray lacks the API, so this checks that it does not.
    assert _ray_compat.is_worker_process_dead(ray.WorkerID.from_random().hex()) is False
    if RAY_VERSION >= (2, 52):
        assert callable(state.state._connect_and_get_accessor().get_worker_info)
    else:
        old_state: Any = state.state
        assert callable(old_state.global_state_accessor.get_worker_info)


def test_modules_of_a_fork_server_exist() -> None:
    for name in _ray_compat.WORKER_MODULES:
        importlib.import_module(name)


def test_nodes_have_available_resources_and_no_autoscaler() -> None:
    (resources,) = _ray_compat.get_available_resources().values()
    assert resources["memory"] > 0
    assert _ray_compat.get_draining_nodes() == {}
    assert not _ray_compat.has_growing_node_group()
    assert not _ray_compat.is_autoscaler_v2_enabled()
    assert _ray_compat.is_head_of_local_ray()


def test_cluster_with_growing_node_group_rejects_no_workers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    too_many = ScalingConfig(num_workers=1000)
    with pytest.raises(InsufficientResourcesError, match="at most 8 fit on the whole cluster"):
        check_cluster_fits(too_many)
    groups = [SimpleNamespace(min_count=0, max_count=2)]
    config = SimpleNamespace(node_group_configs=groups)
    monkeypatch.setattr(state.state, "get_cluster_config", lambda: config)
    check_cluster_fits(too_many)


def test_object_is_owned_by_process_that_put_it() -> None:
    @ray.remote(num_cpus=0)
    def put() -> list[Any]:
        return [ray.put(1)]

    (other,) = ray.get(put.remote())
    assert _ray_compat.is_owned_by_this_process(ray.put(1))
    assert not _ray_compat.is_owned_by_this_process(other)


def test_loggers_and_printer_of_ray_have_their_names() -> None:
    assert "SIGTERM handler is not set because current thread" in inspect.getsource(worker)
    assert callable(worker.print_to_stdstream)
    assert "ray._private.worker" in logging.root.manager.loggerDict


def test_data_context_is_current_in_block() -> None:
    context = ray.data.DataContext.get_current()
    other = context.copy()
    with _ray_compat.current_data_context(other):
        assert ray.data.DataContext.get_current() is other
    assert ray.data.DataContext.get_current() is context


def test_dataset_has_block_rows_iterators_and_execution_index() -> None:
    tables = [pa.table({"id": [0, 1]}), pa.table({"id": [2, 3, 4]})]
    dataset = ray.data.from_arrow(tables).materialize()
    assert _ray_compat.count_block_rows(dataset) == [2, 3]
    assert _ray_compat.is_data_iterator(dataset.iterator())
    base = _ray_compat.get_base_dataset(dataset.iterator())
    assert base is not None
    assert base.count() == 5
    assert _ray_compat.get_split_coordinator(dataset.iterator()) is None
    first, _ = dataset.streaming_split(2, equal=True)
    coordinator = _ray_compat.get_split_coordinator(first)
    assert coordinator is not None
    ray.kill(coordinator)
    assert ("_execution_idx" in vars(dataset.context)) == (RAY_VERSION >= (2, 54))


@pytest.mark.parametrize(
    ("setting", "is_replaced"),
    [
        ({}, True),
        ({"env_vars": {"A": "${B}/x", "C": "${D}$B y"}, "command_prefix": ["cd", "/", "&&"]}, True),
        ({"override_worker_entrypoint": "other.py"}, False),
        ({"py_executable": "echo of the user"}, False),
    ],
)
def test_setup_of_forked_worker_runs_the_command_of_ray(
    setting: dict[str, Any], is_replaced: bool
) -> None:
    command = f"echo $PWD $A $C; echo {client.__file__}"
    context = RuntimeEnvContext(**{"py_executable": command, **setting}).serialize()
    script = str(Path(ray.__file__).parent / "_private" / "workers" / "setup_worker.py")
    arguments = [f"--serialized-runtime-env-context={context}", "--language=PYTHON"]
    replacement = "import sys; from drawbar._fork_server import ray_setup as r; r.run(sys.argv[1:])"

    def start_worker(*python: str) -> str:
        process = subprocess.run(
            [sys.executable, *python, "default_worker.py", "--name=a b $A", *arguments],
            env={**os.environ, "B": "b"},
            capture_output=True,
            text=True,
        )
        return process.stdout

    # Without `site`, so that the line in the `.pth` file does not run.
    path = [entry for entry in sys.path if entry]
    of_ray = (
        f"import sys, runpy; sys.path[:] = {path!r}; runpy.run_path({script!r}, None, '__main__')"
    )
    assert (start_worker("-c", replacement) == start_worker("-S", "-c", of_ray)) == is_replaced
