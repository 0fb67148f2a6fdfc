"""What is asked of a Ray cluster: its machines, what they see of the storage, how pairs meet."""

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

PROBE_TIMEOUT_S = 60.0
_ROUNDS = 5
_BYTES = 16 * 2**20


class NodeProbe:
    """Looks around on a node of the cluster."""

    def __init__(self) -> None:
        if not os.environ.get("CUDA_VISIBLE_DEVICES", "none"):
            del os.environ["CUDA_VISIBLE_DEVICES"]  # by which Ray hides what was not asked for

    def collect(self, storage: str) -> MachineInfo:
        """Look at the machine."""
        return collect(storage)

    def path_exists(self, path: str) -> bool:
        """Whether there is such a file here."""
        return os.path.exists(path)

    def start_store(self) -> tuple[str, int]:
        """Listen for a pair, on a port that is free; gives address and port."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its __all__

        address = str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # Ray has no types here
        self._store = TCPStore(address, 0, 2, is_master=True, wait_for_workers=False)
        return address, self._store.port

    def measure_allreduce(self, address: str, port: int, rank: int, backend: str) -> float | str:
        """Add up numbers with another node; gives bytes per second, or what has failed.

        A failure is told and not raised: Ray prints each raised one that is not asked for.
        """
        try:
            return self._allreduce_bandwidth(address, port, rank, backend)
        except Exception as error:
            return last_line(error)

    def _allreduce_bandwidth(self, address: str, port: int, rank: int, backend: str) -> float:
        import torch
        from torch import distributed
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its __all__

        store = self._store if rank == 0 else TCPStore(address, port, 2)
        distributed.init_process_group(backend, store=store, rank=rank, world_size=2)
        try:
            device = "cuda" if backend == "nccl" else "cpu"
            numbers = torch.ones(_BYTES // 4, device=device)
            distributed.all_reduce(numbers)
            began = time.perf_counter()
            for _ in range(_ROUNDS):
                distributed.all_reduce(numbers)
            numbers.sum().item()  # it is done
            return _ROUNDS * _BYTES / (time.perf_counter() - began)
        finally:
            distributed.destroy_process_group()


def last_line(error: Exception) -> str:
    told = str(error).strip().splitlines()
    return told[-1] if told else repr(error)


@contextmanager
def start_probes(address: str, *, gpus: bool = False) -> Iterator[dict[str, Any]]:
    """Have a probe on each node of the cluster at an address, by its host name.

    Raises:
        ConnectionError: There is no such cluster.
    """
    did_init = not ray.is_initialized()
    if did_init:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    remote: Any = ray.remote
    made: dict[str, Any] = {}
    try:
        for node in ray.nodes():  # type: ignore[no-untyped-call]  # Ray has no types here
            if node["Alive"]:
                where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
                options = {"num_cpus": 0, "scheduling_strategy": where}
                name = node["NodeManagerHostname"]
                while name in made:
                    name += "'"  # two nodes of one machine
                made[name] = remote(NodeProbe).options(**options).remote()
        yield made
    finally:
        for probe in made.values():
            ray.kill(probe)
        if did_init:
            ray.shutdown()


def collect_machines(found: dict[str, Any], storage: str) -> tuple[list[MachineInfo], list[float]]:
    """Look at every node; gives also by how many seconds its clock is ahead of the one here."""
    told, offsets = [], []
    for probe in found.values():
        asked = time.time()
        machine: MachineInfo = ray.get(probe.collect.remote(storage), timeout=PROBE_TIMEOUT_S)
        answered = time.time()
        told.append(machine)
        clock_error = max(machine.clock - answered, asked - machine.clock, 0.0)
        offsets.append(clock_error if machine.clock > answered else -clock_error)
    return told, offsets


def check_storage(found: dict[str, Any], storage: str) -> Iterator[CheckResult]:
    """Say whether every node sees what is written to the storage path here."""
    if "://" in storage:
        yield CheckResult("ok", "storage path", f"{storage} is the same place for all nodes")
        return
    probe_file = Path(storage) / f".drawbar-doctor-{uuid.uuid4().hex}"
    made = [each for each in probe_file.parents if not each.exists()]
    try:
        probe_file.parent.mkdir(parents=True, exist_ok=True)
        probe_file.touch()
    except OSError as error:
        advice = "give a storage path that this user may write to"
        yield CheckResult("problem", "storage path", str(error), advice, socket.gethostname())
        return
    try:
        for name, probe in found.items():
            if ray.get(probe.path_exists.remote(str(probe_file)), timeout=PROBE_TIMEOUT_S):
                yield CheckResult("ok", "storage path", f"{storage} is shared", node=name)
            else:
                yield CheckResult(
                    "warning",
                    "storage path",
                    f"{storage} is another folder there: its ranks send their files to the driver",
                    "mount it there, or take an object store, such as s3://...",
                    name,
                )
    finally:
        probe_file.unlink(missing_ok=True)
        for each in made:
            with suppress(OSError):  # somebody has put something there meanwhile
                each.rmdir()


def check_node_pairs(found: dict[str, Any], backend: str) -> Iterator[CheckResult]:
    """Have every pair of nodes meet by a backend of torch, and say how fast they are."""
    for (one, first), (other, second) in itertools.combinations(found.items(), 2):
        subject, pair = f"{backend} all-reduce", f"{one} and {other}"
        try:
            address, port = ray.get(first.start_store.remote(), timeout=PROBE_TIMEOUT_S)
            meetings = [
                first.measure_allreduce.remote(address, port, 0, backend),
                second.measure_allreduce.remote(address, port, 1, backend),
            ]
            met: list[float | str] = ray.get(meetings, timeout=PROBE_TIMEOUT_S)
        except Exception as error:
            met = [last_line(error)]
        failures = [each for each in met if isinstance(each, str)]
        if failures:
            advice = (
                "open all ports between the nodes, and name the interface that they share: "
                f"{'GLOO' if backend == 'gloo' else 'NCCL'}_SOCKET_IFNAME"
            )
            yield CheckResult("problem", subject, failures[0], advice, pair)
        else:
            speed = min(each for each in met if isinstance(each, float))
            yield CheckResult("ok", subject, f"{speed / 1e9:.2f} GB/s", node=pair)
