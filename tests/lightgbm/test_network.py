"""LightGBM's network during the training function, and its ports."""

from __future__ import annotations

import os
import signal
import socket
import sys
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from subprocess import PIPE, Popen
from threading import Barrier
from typing import Any

import lightgbm
import numpy as np
import pytest

from drawbar._rendezvous import reserved_port
from drawbar._rendezvous._ports import _ephemeral_range
from drawbar.lightgbm import LightGBMConfig, _c_api, get_network_params, train
from drawbar.train import Result, ScalingConfig, WorkerGroupError, get_context
from drawbar.train.testing import BackendContract


@pytest.mark.usefixtures("ray_cluster")
class TestLightGBM(BackendContract):
    backend_config = LightGBMConfig()


def train_shard(x: Any, y: Any, rounds: int = 5) -> str:
    context = get_context()
    mine = slice(context.get_world_rank(), None, context.get_world_size())
    params = {"objective": "binary", "verbosity": -1, **get_network_params()}
    data = lightgbm.Dataset(np.ascontiguousarray(x[mine]), y[mine])
    return trees(lightgbm.train(params, data, rounds))


def trees(booster: lightgbm.Booster) -> str:
    return booster.model_to_string().partition("\nparameters")[0]


def test_all_ranks_train_one_model(fit_on_ray: Callable[..., Result], binary: Any) -> None:
    found = fit_on_ray(lambda: train_shard(*binary)).return_values
    assert found[0] == found[1]
    assert found[0].count("\nTree=") == 5


def test_network_in_reused_process_trains_again(
    fit_on_ray: Callable[..., Result], binary: Any
) -> None:
    """A peer dies in the middle of training; the other gets an error from C, and is kept."""

    def function() -> tuple[int, bool]:
        context = get_context()
        kept = context.cache.get("pid") == os.getpid()
        context.cache["pid"] = os.getpid()
        doomed = context.get_attempt() == 0 and context.get_world_rank() == 1

        def die(env: Any) -> None:
            if doomed and env.iteration == 3:
                os.kill(os.getpid(), signal.SIGKILL)

        params = {"verbosity": -1, **get_network_params()}
        lightgbm.train(params, lightgbm.Dataset(*binary), 10, callbacks=[die])
        return context.get_attempt(), kept

    assert fit_on_ray(function, max_failures=1).return_values == [(1, True), (1, False)]


def test_threads_are_the_workers_share(fit_on_ray: Callable[..., Result]) -> None:
    workers = ScalingConfig(num_workers=2, resources_per_worker={"CPU": 1})
    (first, second) = fit_on_ray(get_network_params, scaling_config=workers).return_values
    assert first == second
    assert first == {
        "num_threads": 1,
        "num_machines": 2,
        "tree_learner": "data",
        "pre_partition": True,
    }


def test_one_worker_has_no_network(fit: Callable[..., Result]) -> None:
    assert set(fit(get_network_params, num_workers=1).return_value) == {"num_threads"}


def test_serial_tree_learner_needs_one_worker(
    fit: Callable[..., Result], binary: tuple[Any, Any]
) -> None:
    params = {"tree_learner": "serial", "verbosity": -1}

    def function() -> str:
        model: str = train(params, lightgbm.Dataset(*binary), 2).model_to_string()
        return model

    assert "[tree_learner: serial]" in fit(function, num_workers=1).return_value
    with pytest.raises(WorkerGroupError, match="'serial' needs a single worker"):
        fit(function, num_workers=2)


def test_get_network_params_outside_training_function_raises() -> None:
    with pytest.raises(RuntimeError, match="inside a training function"):
        get_network_params()


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
    assert not set(ports) & set(_ephemeral_range())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"port_range": (20000,)}, "first and the last port"),
        ({"port_range": (30000, 20000)}, "first and the last port"),
        ({"port_range": (80, 90)}, "1024"),
        ({"timeout_s": 0}, "must be positive and finite, found 0"),
        ({"timeout_s": "1"}, "must be seconds or a timedelta"),
    ],
)
def test_wrong_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        LightGBMConfig(**options)
