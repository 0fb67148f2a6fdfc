"""Rendezvous of `drawbar launch` on several nodes."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from drawbar.cli._output import CommandError
from drawbar.cli._rendezvous import Head, Invitation, Peer, Rendezvous, connect_to_head


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"rdzv-id": "7", "master-port": "1"}, None),
        ({"node-rank": "0", "nodes": "1"}, None),
        (
            {"node-rank": "1", "master-addr": "node-0", "master-port": "1234", "rdzv-id": "7"},
            Rendezvous("node-0", 1234, 2, 2, run_id="7", node_rank=1, is_host=False),
        ),
        ({"node-rank": "0"}, Rendezvous("127.0.0.1", 29500, 2, 2, node_rank=0, is_host=True)),
        (
            {
                "rdzv-backend": "c10d",
                "rdzv-endpoint": "[::1]",
                "rdzv-conf": "join_timeout=5,last_call_timeout=1,is_host=false",
                "local-addr": "10.0.0.1",
            },
            Rendezvous(
                "::1",
                29400,
                2,
                2,
                is_host=False,
                join_timeout=5,
                last_call_timeout=1,
                local_address="10.0.0.1",
            ),
        ),
    ],
)
def test_rendezvous_of_torchrun_options(
    options: dict[str, str], expected: Rendezvous | None
) -> None:
    nodes = int(options.pop("nodes", "2"))
    values = {f"--{name}": value for name, value in options.items()}
    assert Rendezvous.from_options(values, (nodes, nodes)) == expected


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rdzv-backend": "etcd", "rdzv-endpoint": "a"}, "must be static or c10d, found 'etcd'"),
        ({"rdzv-endpoint": "host:port"}, "must be HOST:PORT, found 'host:port'"),
        ({"node-rank": "2"}, "--node-rank must be a number from 0 to 1, found '2'"),
        ({"node-rank": "0", "rdzv-conf": "join_timeout=x"}, "must be a number of seconds"),
    ],
)
def test_rendezvous_of_invalid_options_raises(options: dict[str, str], message: str) -> None:
    values = {f"--{name}": value for name, value in options.items()}
    with pytest.raises(CommandError, match=message):
        Rendezvous.from_options(values, (2, 2))


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


def get_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def test_first_command_that_listens_is_the_head(threads: ThreadPoolExecutor) -> None:
    options = Rendezvous("localhost", get_free_port(), 2, 3, run_id="job", last_call_timeout=0)
    listener = options.listen()
    assert listener is not None
    assert options.listen() is None  # another command on this host
    assert replace(options, host="192.0.2.1").listen() is None  # the address of another host
    head = Head(options, listener)
    head.start()

    def join(**changes: object) -> Future[tuple[Peer, Invitation]]:
        return threads.submit(connect_to_head, replace(options, **changes))  # type: ignore[arg-type]

    with pytest.raises(CommandError, match="has --rdzv-id job, and this node has other"):
        join(run_id="other").result()
    with socket.create_connection(("localhost", options.port)) as other_program:
        other_program.sendall(b"GET / HTTP/1.1\r\n")
    first = join(node_rank=2)
    assert head.wait_for_nodes() == 2
    with pytest.raises(CommandError, match="Another node has --node-rank 2"):
        join(node_rank=2).result()
    head.publish("10.0.0.1:6379", "token")
    peer, invitation = first.result()
    assert invitation == Invitation(2, "10.0.0.1:6379", "token")
    late, late_invitation = join().result()  # --nnodes 2:3
    assert late_invitation.node_rank == 1
    with pytest.raises(CommandError, match="All 3 nodes of --nnodes have joined"):
        join().result()
    head.require_alive()
    late.close()
    with pytest.raises(CommandError, match="The command on node 1 has ended"):
        head.require_alive()
    head.close(3)
    assert peer.receive() == {"exit_code": 3}
    with closing(peer), pytest.raises(ConnectionError):
        peer.receive()


def test_rendezvous_without_other_nodes_fails_after_the_timeout() -> None:
    options = Rendezvous("localhost", get_free_port(), 2, 2, join_timeout=0)
    with pytest.raises(CommandError, match="No command has listened at localhost"):
        connect_to_head(options)
    listener = options.listen()
    assert listener is not None
    with listener, pytest.raises(CommandError, match="1 of 2 nodes have joined at localhost"):
        Head(options, listener).wait_for_nodes()


def test_launch_on_two_nodes_forms_a_cluster_and_ends_with_the_exit_code(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys\n"
        "from drawbar import train\n"
        "names = ('RANK', 'LOCAL_RANK', 'GROUP_RANK', 'WORLD_SIZE', 'LOCAL_WORLD_SIZE')\n"
        "ranks = [os.environ[name] for name in names]\n"
        "for line in train.collective.all_gather(ranks): print(*line)\n"
        "sys.stdout.flush()\n"
        "train.collective.barrier()\n"
        "sys.exit(4)\n"
    )
    options = [
        *("--nnodes", "2", "--nproc-per-node", "2", "--master-addr", "localhost"),
        *("--master-port", str(get_free_port()), "--storage-path", str(tmp_path)),
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "drawbar.cli", "launch", *options, str(script)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**env, "PET_NODE_RANK": str(node_rank)},
            text=True,
        )
        for node_rank in range(2)
    ]
    (out, err), (other_out, other_err) = (process.communicate() for process in processes)
    assert [process.returncode for process in processes] == [4, 4], err + other_err
    assert out.splitlines() == ["0 0 0 4 2", "1 1 0 4 2", "2 0 1 4 2", "3 1 1 4 2"]
    assert other_out == ""
    assert re.fullmatch(r"drawbar: Node 1 of the run at \S+\.\n", other_err)
