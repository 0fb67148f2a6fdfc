"""Tests of a group whose collectives another thread can end."""

from __future__ import annotations

import multiprocessing
import threading
from datetime import timedelta
from multiprocessing.connection import Connection

import torch

from drawbar.torch._replica_group import ReplicaGroup, open_store

SIZE = 3
ROUNDS = 20


def leave_collectives(rank: int, address: str, connection: Connection) -> None:
    """Wait in collectives that the last rank never joins, until another thread ends them."""
    torch.set_num_threads(1)
    ended = 0
    for number in range(ROUNDS):
        group = ReplicaGroup(address, str(number), rank, SIZE, timedelta(minutes=5))
        assert group.is_complete
        assert group.gather([rank, number]) == [[other, number] for other in range(SIZE)]
        if rank < SIZE - 1:
            works = [group.start_sum(torch.ones(10_000)) for _ in range(3)]
            thread = threading.Thread(target=group.shut_down)
            thread.start()
            for work in works:
                try:
                    work.wait()
                except RuntimeError:
                    ended += 1
            thread.join()
        group.close()
    connection.send(ended)


def test_replica_group_shut_down_by_other_thread_ends_all_collectives() -> None:
    store = open_store("127.0.0.1")
    address = f"{store.host}:{store.port}"
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe(duplex=False) for _ in range(SIZE)]
    processes = [
        context.Process(target=leave_collectives, args=(rank, address, writer))
        for rank, (_, writer) in enumerate(pipes)
    ]
    for process in processes:
        process.start()
    try:
        ended = [reader.recv() if reader.poll(300) else None for reader, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert ended == [3 * ROUNDS] * (SIZE - 1) + [0]


def exchange_bytes(rank: int, address: str, connection: Connection) -> None:
    group = ReplicaGroup(address, "messages", rank, 2, timedelta(minutes=5))
    if rank == 0:
        group.send(b"state" * 1000, 1)
    else:
        connection.send(group.receive(0))
    group.gather([0])
    group.close()


def test_replica_group_sends_bytes_of_any_length() -> None:
    store = open_store("127.0.0.1")
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    processes = [
        context.Process(target=exchange_bytes, args=(rank, f"{store.host}:{store.port}", writer))
        for rank in range(2)
    ]
    for process in processes:
        process.start()
    try:
        received = reader.recv() if reader.poll(300) else None
    finally:
        for process in processes:
            process.join(60)
            process.kill()
    assert received == b"state" * 1000
