"""Runs whose workers are forked from the fork server of their node."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
import ray

from drawbar import train
from drawbar.train import DataParallelTrainer, RunConfig, WorkerGroupError, collective
from tests.train.runs import fit

pytestmark = pytest.mark.usefixtures("ray_cluster")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

MODULE = "http.server"  # Ray does not import it


@pytest.fixture(autouse=True)
def _learn_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start fork servers as in a program of a user."""
    monkeypatch.delenv("DRAWBAR_FORKSERVER_PRELOAD")


def find_server() -> int:
    """Return the process ID of the server that has forked this process, 0 if there is none."""
    parent = os.getppid()
    command = Path(f"/proc/{parent}/cmdline").read_text()
    return parent if "_fork_server/server.py" in command else 0


def be_killed_once(flag: Path) -> int:
    assert MODULE in sys.modules
    print("before the report")
    train.report({"loss": 1.0})
    if train.get_context().get_world_rank() == 1 and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return find_server()


def test_start_restart_and_later_run_use_one_server(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    servers = set()
    for name in ("first", "second"):
        result = fit(
            be_killed_once,
            RunConfig(name=name, storage_path=tmp_path),
            tmp_path / "was_killed",
            num_workers=2,
            max_failures=1,
            forkserver_preload=[MODULE],
        )
        servers |= set(result.return_values or [])
    (server,) = servers
    assert server != 0
    assert capfd.readouterr().err.count("rank 1: worker process died: killed by SIGKILL") == 1
    assert "before the report" in (tmp_path / "second" / "logs" / "rank_1.log").read_text()


@pytest.mark.nightly
def test_forked_worker_starts_without_the_setup_script_of_ray(drivers: Any, tmp_path: Path) -> None:
    # Python imports `sitecustomize` after it has executed the lines of `.pth` files.
    started = tmp_path / "started"
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        f"with open({str(started)!r}, 'a') as file:\n"
        "    print(*sys.orig_argv[1:2], file=file)\n"
    )

    def main() -> None:
        result = fit(find_server, tmp_path, num_workers=1, forkserver_preload=[MODULE])
        assert result.return_value != 0
        assert "setup_worker.py" not in started.read_text()
        # The worker of another runtime environment is set up by Ray.
        task = ray.remote(find_server).options(runtime_env={"env_vars": {"OTHER": "1"}})
        ray.get(task.remote())
        assert "setup_worker.py" in started.read_text()

    drivers.run(main, RAY_ADDRESS="local", PYTHONPATH=str(tmp_path))


def test_import_error_starts_workers_without_server_and_is_shown_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    result = fit(find_server, tmp_path, num_workers=2, forkserver_preload=["missing_module"])
    assert result.return_values == [0, 0]
    shown = capfd.readouterr().err
    assert shown.count("Workers started without the fork server") == 1
    assert "No module named 'missing_module'" in shown


def test_environment_variable_sets_default_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function() -> bool:
        return find_server() != 0

    def run(name: str, modules: list[str] | None = None) -> Any:
        config = RunConfig(name=name, storage_path=tmp_path, forkserver_preload=modules)
        return fit(function, config, num_workers=1).return_value

    monkeypatch.setenv("DRAWBAR_FORKSERVER_PRELOAD", f"{MODULE}, json")
    assert run("default")
    assert not run("other", [])
    monkeypatch.setenv("DRAWBAR_FORKSERVER_PRELOAD", "")
    assert not run("off")
    monkeypatch.setenv("DRAWBAR_FORKSERVER_PRELOAD", "jax")
    with pytest.raises(ValueError, match="DRAWBAR_FORKSERVER_PRELOAD must not have 'jax'"):
        run("invalid")


def test_tasks_of_forked_worker_are_not_forked(tmp_path: Path) -> None:
    def function() -> tuple[int, int, int]:
        is_forked = int(find_server() != 0)
        task: Any = ray.remote(find_server)
        with_variable = task.options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "2"}})
        first, second = ray.get([task.remote(), with_variable.remote()])
        return is_forked, first, second

    result = fit(function, tmp_path, num_workers=1, forkserver_preload=[MODULE])
    assert result.return_value == (1, 0, 0)


def test_forked_workers_create_different_objects_and_use_arrow(tmp_path: Path) -> None:
    # Both libraries are imported before the fork. A copy of their state must not do harm.
    def function() -> tuple[bool, list[str], int]:
        import pyarrow.compute
        from pyarrow import parquet

        identifiers = []
        thread = threading.Thread(target=lambda: identifiers.append(ray.put(1).hex()))
        thread.start()  # another thread creates identifiers from random numbers
        thread.join()
        rank = train.get_context().get_world_rank()
        table = pyarrow.table({"x": range(100_000), "y": range(100_000)})
        parquet.write_table(table, tmp_path / f"{rank}.parquet", row_group_size=1000)
        column = parquet.read_table(tmp_path / f"{rank}.parquet", use_threads=True)["x"]
        total = pyarrow.compute.sum(column).as_py()
        return find_server() != 0, [*identifiers, ray.put(1).hex()], total

    result = fit(function, tmp_path, num_workers=2, forkserver_preload=["pyarrow"])
    assert result.return_values is not None
    are_forked, identifiers, totals = zip(*result.return_values, strict=True)
    assert all(are_forked)
    assert len({name for names in identifiers for name in names}) == 4
    assert set(totals) == {sum(range(100_000))}


def test_import_reads_variables_of_the_runtime_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "reader.py").write_text(
        "import os\nNAMES = ('SETTING', 'HF_HUB_DISABLE_IMPLICIT_TOKEN')\n"
        "SETTINGS = [os.environ[name] for name in NAMES]\n"
    )
    env_vars = {"PYTHONPATH": str(tmp_path), "SETTING": "of the worker"}
    monkeypatch.setenv("SETTING", "of the driver")
    monkeypatch.setenv("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1")  # only its name is one of a secret

    def function() -> tuple[bool, list[str]]:
        return find_server() != 0, importlib.import_module("reader").SETTINGS

    run = RunConfig(
        name="run",
        storage_path=tmp_path,
        worker_runtime_env={"env_vars": env_vars},
        forkserver_preload=["reader"],
    )
    assert fit(function, run, num_workers=1).return_value == (True, ["of the worker", "1"])


def test_exception_and_exit_code_of_forked_worker(tmp_path: Path) -> None:
    def function() -> None:
        os._exit(7)

    with pytest.raises(WorkerGroupError, match="exited with code 7"):
        fit(function, tmp_path, num_workers=1, forkserver_preload=[MODULE])


def import_and_be_killed_once(config: dict[str, Any]) -> tuple[bool, bool]:
    """Return whether this process was forked, and whether it had the module at its start."""
    was_imported = config["module"] in sys.modules
    os.environ.update(config["environment"])
    importlib.import_module(config["module"])
    train.report({})
    collective.barrier()  # the driver knows what rank 0 has imported
    flag = config["flag"]
    if train.get_context().get_world_rank() == 1 and not flag.exists():
        flag.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return find_server() != 0, was_imported


@pytest.mark.parametrize(
    ("module", "environment"),
    [
        ("pandas", {}),
        ("this", {}),  # not preloaded: the workers have only what each worker imports
        pytest.param("pandas", {"PANDAS_SETTING": "read by the import"}, marks=pytest.mark.nightly),
    ],
)
def test_restart_and_later_run_preload_what_the_function_imported(
    tmp_path: Path, module: str, environment: dict[str, str]
) -> None:
    def function(config: dict[str, Any]) -> tuple[bool, bool]:
        return import_and_be_killed_once(config)

    # The function of another case has the same name, but imports something else.
    function.__qualname__ += module + repr(environment)
    runs = [
        fit(
            function,
            RunConfig(name=name, storage_path=tmp_path),
            {"module": module, "environment": environment, "flag": tmp_path / "was_killed"},
            num_workers=2,
            max_failures=1,
        ).return_values
        for name in ("first", "second")
    ]
    kept = (False, True)  # rank 0 of the first run keeps its process after the failure
    forked = (True, module == "pandas" and not environment)
    assert runs == [[kept, forked], [forked, forked]]


def test_variable_that_only_a_later_run_sets_is_not_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def function(config: dict[str, Any]) -> tuple[bool, str]:
        os.environ.update(config)
        import pandas as pd

        train.report({})
        collective.barrier()  # the driver knows what rank 0 has imported and changed
        return find_server() != 0, str(pd.get_option("mode.copy_on_write"))

    changed = {"PANDAS_COPY_ON_WRITE": "warn"}
    outcomes = [
        fit(function, RunConfig(name=str(run), storage_path=tmp_path), config, num_workers=1)
        for run, config in enumerate([{}, {}, changed, changed, changed])
    ]
    values = [outcome.return_values[0] for outcome in outcomes if outcome.return_values]
    assert [is_forked for is_forked, _ in values] == [False, True, True, False, True]
    assert [option for _, option in values[3:]] == ["warn", "warn"]  # as in fresh workers
    [warning] = [each.getMessage() for each in caplog.records if each.name == "drawbar.train"]
    assert "has changed PANDAS_COPY_ON_WRITE, but did not do so in an earlier run" in warning


def test_import_path_of_forked_worker_equals_that_of_fresh_worker(tmp_path: Path) -> None:
    def function(config: dict[str, Any]) -> list[str]:
        return sys.path

    paths = []
    for preload in ([], [MODULE]):
        run = RunConfig(storage_path=tmp_path)
        result = fit(function, run, num_workers=1, forkserver_preload=preload)
        paths += result.return_values or []
    assert paths[0] == paths[1]


def test_second_run_of_a_notebook_cell_is_forked(tmp_path: Path) -> None:
    cell = """
def train_func(config):
    import os, pandas
    from drawbar import train
    train.report({"parent": open(f"/proc/{os.getppid()}/cmdline").read()})
"""
    parents = []
    for name in ("first", "second"):
        notebook = {"__name__": "__main__"}
        exec(cell, notebook)  # a cell defines the function again each time
        result = fit(
            notebook["train_func"], RunConfig(name=name, storage_path=tmp_path), num_workers=1
        )
        assert result.metrics is not None
        parents.append(result.metrics["parent"])
    assert ["_fork_server/server.py" in parent for parent in parents] == [False, True]


@pytest.mark.nightly
def test_unsafe_import_of_the_function_is_shown_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    # It has the name of a package that is preloaded, and hides it.
    (tmp_path / "lightgbm.py").write_text(
        "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    )
    runtime_env = {"env_vars": {"PYTHONPATH": str(tmp_path)}}

    def function(config: dict[str, Any]) -> tuple[bool, bool]:
        return import_and_be_killed_once(config)

    flag = tmp_path / "was_killed"
    config = {"module": "lightgbm", "environment": {}, "flag": flag}
    for name in ("first", "second"):
        run = RunConfig(name=name, storage_path=tmp_path, worker_runtime_env=runtime_env)
        result = fit(function, run, config, num_workers=2, max_failures=1)
        assert [is_forked for is_forked, _ in result.return_values or []] == [False, False]
    shown = capfd.readouterr().err
    assert shown.count("Workers started without the fork server") == 1
    assert "lightgbm started threads, which a fork would lose" in shown


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        (["jax.numpy"], "must not have 'jax.numpy', because it starts threads"),
        (["torch; import os"], "must have names of modules, found 'torch; import os'"),
    ],
)
def test_invalid_module_raises(modules: list[str], message: str) -> None:
    config = RunConfig(forkserver_preload=modules)
    with pytest.raises(ValueError, match=message):
        DataParallelTrainer(print, run_config=config)


def test_other_interpreter_of_the_workers_raises() -> None:
    config = RunConfig(forkserver_preload=["torch"], worker_runtime_env={"pip": ["x"]})
    with pytest.raises(ValueError, match="cannot be combined with worker_runtime_env\\['pip'\\]"):
        DataParallelTrainer(print, run_config=config)
