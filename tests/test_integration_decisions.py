"""Pure decisions of integrations, without Ray and without training."""

from __future__ import annotations

import os
import socket
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from subprocess import PIPE, Popen
from threading import Barrier
from typing import Any

import psutil
import pytest

from drawbar._rendezvous import held_port, reserved_port
from drawbar._rendezvous._ports import _ephemeral_range
from drawbar.jax._tpu_slices import multislice_env, slice_name
from drawbar.lightgbm import _c_api
from drawbar.lightgbm._parameters import choose_histogram_layout
from drawbar.lightning._launcher import interleave_predictions
from drawbar.lightning._strategies.model_parallel import resolve_mesh_shape
from drawbar.torch import TorchTrainer
from drawbar.torch._devices import cuda_indices
from drawbar.torch._process_group import network_interface_to
from drawbar.torch._xla import compile_graphs
from drawbar.trackers._mlflow import make_metric_name
from drawbar.train import DataParallelTrainer, ScalingConfig
from drawbar.train._worker_group.placement import find_free_bundles
from drawbar.tune._trial import (
    apply_parameters,
    choose_run_name,
    sorted_run_names,
    validate_param_space,
)
from drawbar.xgboost import XGBoostTrainer

EARLIER, NEWEST, OTHER = "a/run_1/checkpoint_000002", "a/run_1/checkpoint_000003", "b/run_0/c"


# -- trials of Ray Tune


def function(config: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(
    ("found", "start_from", "newest", "expected"),
    [
        ([], None, None, "run_0"),
        ([], OTHER, None, "run_0"),
        (["run_1", "mine", "run_0"], None, None, "run_1"),
        (["run_9", "run_10"], None, NEWEST, "run_11"),
        (["run_0", "run_1"], NEWEST, NEWEST, "run_1"),
        (["run_0", "run_1"], EARLIER, NEWEST, "run_2"),
        (["run_0", "run_1"], OTHER, NEWEST, "run_2"),
    ],
)
def test_choose_run_name_depends_on_start_checkpoint(
    found: list[str], start_from: str | None, newest: str | None, expected: str
) -> None:
    assert (
        choose_run_name(sorted_run_names(found), start_from, latest_checkpoint=newest) == expected
    )


def test_merge_parameters_changes_dict_keys_and_config_fields() -> None:
    trainer = TorchTrainer(
        function,
        train_loop_config={"lr": 1, "layers": 2},
        scaling_config=ScalingConfig(num_workers=2, placement_strategy="SPREAD"),
        metadata={"team": "a"},
    )
    config = {"train_loop_config": {"lr": 3}, "scaling_config": {"num_workers": 4}}
    changed = apply_parameters(trainer, config, metadata={"team": "b"})
    assert isinstance(changed, TorchTrainer)
    assert changed.train_loop_config == {"lr": 3, "layers": 2}
    expected = ScalingConfig(num_workers=4, placement_strategy="SPREAD")
    assert (changed.scaling_config, changed.metadata) == (expected, {"team": "b"})
    assert trainer.train_loop_config == {"lr": 1, "layers": 2}


def test_apply_parameters_of_training_spec() -> None:
    datasets: dict[str, Any] = {"train": lambda: None}  # not called before the run
    trainer = XGBoostTrainer(
        params={"eta": 0.1, "max_depth": 2}, label_column="y", datasets=datasets
    )
    tuned = apply_parameters(trainer, {"params": {"max_depth": 5}, "num_boost_round": 7})
    fit: Any = tuned.train_loop_per_worker
    assert (fit.params, fit.num_boost_round) == ({"eta": 0.1, "max_depth": 5}, 7)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"lr": 1}, r"not an argument of DataParallel.* 'train_loop_config': \{'lr': ...\}"),
        ({"run_config": {}}, "each trial stores its run in the trial's directory"),
    ],
)
def test_validate_param_space_of_unknown_argument_raises(
    config: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        validate_param_space(DataParallelTrainer, config)


@pytest.mark.parametrize(
    ("bundles", "taken", "count", "expected"),
    [
        ([{"CPU": 1}, {"CPU": 1}], {}, 2, [0, 1]),
        ([{"CPU": 1}, {"CPU": 1}, {"CPU": 2}], {"CPU": 1}, 2, [1, 2]),
        ([{"CPU": 1}], {"CPU": 1}, 1, []),
        ([{"CPU": 4}], {"CPU": 1}, 2, [0, 0]),
        ([{"GPU": 1}, {"CPU": 3}], {}, 8, [1, 1, 1]),
    ],
)
def test_placement_group_factory_bundles_fit_workers(
    bundles: list[dict[str, float]], taken: dict[str, float], count: int, expected: list[int]
) -> None:
    assert find_free_bundles(bundles, taken, {"CPU": 1}, count) == expected


# -- devices and processes


@pytest.mark.parametrize(
    ("gpu_ids", "visible", "indices"),
    [
        (["2"], "0,2,5", [1]),
        (["5", "0"], "0,2,5", [2, 0]),
        (["3"], None, [3]),
        (["MIG-b"], "MIG-a, MIG-b", [1]),
    ],
)
def test_cuda_indices_count_visible_gpus(
    gpu_ids: list[str], visible: str | None, indices: list[int]
) -> None:
    assert cuda_indices(gpu_ids, visible) == indices


def test_cuda_indices_of_hidden_gpu_raises() -> None:
    with pytest.raises(RuntimeError, match="GPU 1 to this worker, but CUDA_VISIBLE_DEVICES='0'"):
        cuda_indices(["1"], "0")


def test_slice_name_is_read_from_node_labels() -> None:
    of_several, alone = {"ray.io/tpu-slice-name": "a"}, {"ray.io/tpu-topology": "2x4"}
    assert [slice_name(labels, "node") for labels in (of_several | alone, alone, {})] == [
        "a",
        "node",
        None,
    ]


def test_multislice_env_with_two_slices_numbers_them_by_rank() -> None:
    by_rank = [multislice_env(["b", "b", "a", "a"], rank, "10.0.0.1") for rank in range(4)]
    assert [each["MEGASCALE_SLICE_ID"] for each in by_rank] == ["0", "0", "1", "1"]
    assert by_rank[3] == {
        "MEGASCALE_COORDINATOR_ADDRESS": "10.0.0.1",
        "MEGASCALE_NUM_SLICES": "2",
        "MEGASCALE_SLICE_ID": "1",
    }
    for one in ("a", None):
        assert multislice_env([one, one], 1, "10.0.0.1") == {}


def test_multislice_env_with_uneven_slices_raises() -> None:
    with pytest.raises(RuntimeError, match=r"3 on 'a', 1 on 'b'. Assign each worker to a slice"):
        multislice_env(["a", "a", "a", "b"], 0, "10.0.0.1")


@pytest.mark.parametrize(
    ("asked", "world", "local", "shape"),
    [
        (("auto", "auto"), 8, 4, (2, 4)),
        ((8, "auto"), 8, 4, (8, 1)),
        (("auto", 2), 8, 4, (4, 2)),
        ((2, 4), 8, 8, (2, 4)),
    ],
)
def test_resolve_mesh_shape_with_auto_fills_size(
    asked: Any, world: int, local: int, shape: tuple[int, int]
) -> None:
    assert resolve_mesh_shape(*asked, world_size=world, local_world_size=local) == shape


def test_resolve_mesh_shape_with_wrong_product_raises() -> None:
    with pytest.raises(ValueError, match=r"data_parallel_size=3 .* do not fit 8 workers"):
        resolve_mesh_shape(3, 2, world_size=8, local_world_size=8)


def test_interleave_predictions_alternates_between_ranks() -> None:
    assert interleave_predictions([["a0", "a1"], ["b0"]], 1) == ["a0", "b0", "a1"]
    assert interleave_predictions([[["a0"], ["a1"]], [["b0"], ["b1"]]], 2) == [
        ["a0", "b0"],
        ["a1", "b1"],
    ]
    assert interleave_predictions([None, None], 1) is None


@pytest.mark.parametrize(
    ("params", "features", "found"),
    [
        ({"num_threads": 1}, 78, {"force_row_wise": True}),
        ({"num_threads": 1}, 79, {}),
        ({"num_threads": 1, "max_bin": 63}, 317, {"force_row_wise": True}),
        ({"n_jobs": 16}, 10, {"force_row_wise": True}),
        ({"n_jobs": 17}, 10, {}),
        ({"n_jobs": -1}, 10, {}),
        ({"num_threads": 1, "device": "cuda"}, 10, {}),
        ({"num_threads": 1, "force_row_wise": False}, 10, {}),
        ({"num_threads": "1", "max_bin": None, "device": None}, 10, {"force_row_wise": True}),
    ],
)
def test_choose_histogram_layout_depends_on_bins_and_threads(
    params: dict[str, Any], features: int, found: dict[str, bool]
) -> None:
    assert choose_histogram_layout(params, features) == found


@pytest.fixture
def neuron_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a `neuron_parallel_compile` of the given script on the PATH; its arguments are logged."""

    def install(script: str) -> Path:
        log, command = tmp_path / "log", tmp_path / "neuron_parallel_compile"
        command.write_text(f'#!/bin/sh\necho "$@" > {log}\n{script}\n')
        command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return log

    return install


def test_compile_graphs_runs_documented_command(
    neuron_command: Callable[[str], Path],
) -> None:
    log = neuron_command("exit 0")
    compile_graphs()
    assert log.read_text().startswith("--command compile")


def test_compile_graphs_failure_raises(neuron_command: Callable[[str], Path]) -> None:
    neuron_command("exit 3")
    with pytest.raises(RuntimeError, match=r"neuron_parallel_compile .* exited with code 3"):
        compile_graphs()


def test_compile_graphs_without_compiler_names_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"not on the worker's PATH.*pip install torch-neuronx"):
        compile_graphs()


# -- network


def test_network_interface_to_follows_route() -> None:
    loopback = network_interface_to("127.0.0.1", 1)
    assert loopback is not None
    addresses = psutil.net_if_addrs()[loopback]
    assert "127.0.0.1" in [each.address for each in addresses if each.family == socket.AF_INET]
    assert network_interface_to("no.such.host.invalid", 1) is None


def test_reserve_port_in_many_processes_is_unique() -> None:
    """Of 6 processes with 40 reservations each, all held at once, no two have the same."""
    code = textwrap.dedent(
        """
        import os, sys
        from contextlib import ExitStack
        from drawbar._rendezvous import reserved_port
        all(os.fork() for _ in range(5))  # children and the parent continue below
        with ExitStack() as stack:
            found = range(20000, 20400)
            ports = [str(stack.enter_context(reserved_port(found))) for _ in range(40)]
            os.write(1, (" ".join(ports) + "\\n").encode())  # all at once
            sys.stdin.read()
        """
    )
    with Popen([sys.executable, "-c", code], stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(6)]
        process.communicate()
    ports = [int(port) for line in lines for port in line.split()]
    assert len(ports) == 240
    assert len(set(ports)) == 240


def test_twenty_networks_at_once_do_not_collide() -> None:
    """A network is a thread's, so that 20 pairs of threads are 20 trainers of 2 workers.

    Meanwhile a thief takes every port that it can get by asking for any.
    """
    done, reserved = threading.Event(), Barrier(40)
    with ThreadPoolExecutor(41) as pool, ExitStack() as loot:
        thief = pool.submit(steal_ports, loot, done)
        pairs = [(Barrier(2), ["", ""]) for _ in range(20)]
        ends = [
            pool.submit(join, rank, reserved, barrier, machines)
            for barrier, machines in pairs
            for rank in (0, 1)
        ]
        ports = [end.result() for end in ends]
        done.set()
        assert thief.result() > 0
    assert len(set(ports)) == 40


def join(rank: int, reserved: Barrier, barrier: Barrier, machines: list[str]) -> int:
    with reserved_port() as port:
        machines[rank] = f"127.0.0.1:{port}"
        reserved.wait()  # all hold their ports at once
        _c_api.init_network(machines, port, timeout_minutes=1)
        barrier.wait()
        _c_api.free_network()
    return port


def steal_ports(loot: ExitStack, done: threading.Event) -> int:
    taken = 0
    while not done.wait(0.001):
        thief = loot.enter_context(socket.socket())
        thief.bind(("0.0.0.0", 0))
        taken += 1
    return taken


def test_reserve_port_skips_port_in_use() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        taken = server.getsockname()[1]
        with (
            pytest.raises(OSError, match="No TCP port from"),
            reserved_port(range(taken, taken + 1)),
        ):
            raise AssertionError


def test_ports_are_not_those_that_the_kernel_gives_out() -> None:
    """So a program that takes ports as they become free, by asking for any, never gets one."""
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(50)]
        ports += [stack.enter_context(held_port("127.0.0.1")) for _ in range(50)]
    assert len(set(ports)) == 100
    assert not set(ports) & set(_ephemeral_range())


def test_only_servers_that_share_addresses_can_use_a_held_port() -> None:
    with held_port("127.0.0.1") as port:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("0.0.0.0", port))
        with socket.create_server(("0.0.0.0", port), reuse_port=False):
            pass


# -- trackers


def test_mlflow_metric_names_are_valid_and_different() -> None:
    names = [
        "loss",
        "a/b",
        "a b",
        "a%b",
        "a\nb",
        "a\u2028b",
        "a//b",
        "/a",
        "..",
        "a/../b",
        "x" * 300,
    ]
    mapped = [make_metric_name(name) for name in names]
    assert mapped[:3] == names[:3]
    assert len(set(mapped)) == len(names)
    validation = pytest.importorskip("mlflow.utils.validation", reason="needs mlflow")
    for name in mapped:
        validation._validate_metric_name(name)
