"""Checks that need a Ray cluster: nodes, storage, and networking."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from drawbar.cli._doctor.check_result import CheckResult
from drawbar.cli._doctor.machine import MachineInfo, collect
from drawbar.train.health import AllReducePeer

PROBE_TIMEOUT_S = 60.0


class NodeProbe(AllReducePeer):
    """Ray actor that runs checks on one node."""

    def __init__(self) -> None:
        if not os.environ.get("CUDA_VISIBLE_DEVICES", "none"):
            # Ray hides the GPUs from actors that did not request any.
            del os.environ["CUDA_VISIBLE_DEVICES"]

    def collect(self, storage: str) -> MachineInfo:
        """Collect information about this node."""
        return collect(storage)

    def path_exists(self, path: str) -> bool:
        """Return whether a path exists on this node."""
        return os.path.exists(path)


def last_line(error: Exception) -> str:
    """Return the last line of an error message."""
    lines = str(error).strip().splitlines()
    return lines[-1] if lines else repr(error)


@contextmanager
def start_probes(address: str, *, gpus: bool = False) -> Iterator[dict[str, Any]]:
    """Run a probe on each node of a cluster. Yields the probes by host name.

    Raises:
        ConnectionError: There is no cluster at the address.
    """
    did_init = not ray.is_initialized()
    if did_init:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    remote: Any = ray.remote
    probes: dict[str, Any] = {}
    try:
        for node in ray.nodes():  # type: ignore[no-untyped-call]  # Ray has no types here
            if node["Alive"]:
                strategy = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                options = {"num_cpus": 0, "scheduling_strategy": strategy}
                name = node["NodeManagerHostname"]
                while name in probes:
                    name += "'"  # two nodes on one machine
                probes[name] = remote(NodeProbe).options(**options).remote()
        yield probes
    finally:
        for probe in probes.values():
            ray.kill(probe)
        if did_init:
            ray.shutdown()


def collect_machines(probes: dict[str, Any], storage: str) -> tuple[list[MachineInfo], list[float]]:
    """Collect information about every node, and the seconds its clock is ahead of this machine."""
    machines, offsets = [], []
    for probe in probes.values():
        request_time = time.time()
        machine: MachineInfo = ray.get(probe.collect.remote(storage), timeout=PROBE_TIMEOUT_S)
        reply_time = time.time()
        machines.append(machine)
        clock_error = max(machine.clock - reply_time, request_time - machine.clock, 0.0)
        offsets.append(clock_error if machine.clock > reply_time else -clock_error)
    return machines, offsets


def check_storage(probes: dict[str, Any], storage: str) -> Iterator[CheckResult]:
    """Check that every node sees a file that this machine writes to the storage path."""
    if "://" in storage:
        yield CheckResult("ok", "storage path", f"{storage} is a URI, which all nodes share")
        return
    probe_file = Path(storage) / f".drawbar-doctor-{uuid.uuid4().hex}"
    new_directories = [path for path in probe_file.parents if not path.exists()]
    try:
        probe_file.parent.mkdir(parents=True, exist_ok=True)
        probe_file.touch()
    except OSError as error:
        advice = "Choose a storage path that this user can write to."
        yield CheckResult("error", "storage path", str(error), advice, socket.gethostname())
        return
    try:
        for name, probe in probes.items():
            if ray.get(probe.path_exists.remote(str(probe_file)), timeout=PROBE_TIMEOUT_S):
                yield CheckResult("ok", "storage path", f"{storage} is shared", node=name)
            else:
                yield CheckResult(
                    "warning",
                    "storage path",
                    f"{storage} is not shared: ranks on this node send their files to the driver",
                    "Mount it on all nodes, or use an object store such as s3://bucket/runs.",
                    name,
                )
    finally:
        probe_file.unlink(missing_ok=True)
        for directory in new_directories:
            with suppress(OSError):  # another process has created files in it
                directory.rmdir()


def check_node_pairs(probes: dict[str, Any], backend: str) -> Iterator[CheckResult]:
    """Measure the all-reduce bandwidth of a torch backend between every pair of nodes."""
    for (first_name, first), (second_name, second) in itertools.combinations(probes.items(), 2):
        subject, pair = f"{backend} all-reduce", f"{first_name} and {second_name}"
        try:
            address, port = ray.get(first.start_store.remote(), timeout=PROBE_TIMEOUT_S)
            measurements = [
                first.measure_allreduce.remote(address, port, 0, backend),
                second.measure_allreduce.remote(address, port, 1, backend),
            ]
            results: list[float | str] = ray.get(measurements, timeout=PROBE_TIMEOUT_S)
        except Exception as error:
            results = [last_line(error)]
        failures = [result for result in results if isinstance(result, str)]
        if failures:
            interface_env = f"{'GLOO' if backend == 'gloo' else 'NCCL'}_SOCKET_IFNAME"
            advice = (
                f"Open all ports between the nodes, and set {interface_env} to their common "
                "interface."
            )
            yield CheckResult("error", subject, failures[0], advice, pair)
        else:
            speed = min(result for result in results if isinstance(result, float))
            yield CheckResult("ok", subject, f"{speed / 1e9:.2f} GB/s", node=pair)
