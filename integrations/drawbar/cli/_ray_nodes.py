"""Form a Ray cluster from the nodes of a rendezvous."""

from __future__ import annotations

import contextlib
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import IO, Any

from drawbar.cli._exit_handling import StopSignals
from drawbar.cli._output import CommandError
from drawbar.cli._ray_connection import start_ray
from drawbar.cli._rendezvous import Head, Invitation, Peer, Rendezvous, connect_to_head

NODE_RANK_LABEL = "drawbar.io/node-rank"
_POLL_INTERVAL_S = 0.1
_END_TIMEOUT_S = 10.0


def start_head(head: Head, num_cpus: int) -> list[str]:
    """Start Ray on this node, and wait until the other nodes have joined.

    Args:
        head: Head of the rendezvous.
        num_cpus: CPUs of this node for Ray.

    Returns:
        The Ray node IDs by node rank.

    Raises:
        CommandError: Too few nodes have joined, or one has ended.
    """
    import ray

    head.start()
    num_nodes = head.wait_for_nodes()
    start_ray(num_cpus, head.rendezvous.local_address)
    # Ray has set the variable if it requires a token by default.
    auth_mode = os.environ.get("RAY_AUTH_MODE", "")
    head.publish(ray.get_runtime_context().gcs_address, auth_mode)
    deadline = time.monotonic() + head.rendezvous.join_timeout
    while len(node_ids := _list_node_ids()) < num_nodes:
        head.require_alive()
        if time.monotonic() > deadline:
            raise CommandError(
                f"{len(node_ids)} of {num_nodes} nodes have joined the Ray cluster within "
                f"{head.rendezvous.join_timeout:g} s. Check that the nodes can connect to "
                f"{ray.get_runtime_context().gcs_address}, or set --local-addr."
            )
        time.sleep(_POLL_INTERVAL_S)
    return node_ids


def _list_node_ids() -> list[str]:
    import ray

    own_id = ray.get_runtime_context().get_node_id()
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]  # Ray has none
    ranks = {node["NodeID"]: node["Labels"].get(NODE_RANK_LABEL) for node in nodes if node["Alive"]}
    others = {node_id: int(rank) for node_id, rank in ranks.items() if rank is not None}
    return [own_id, *sorted(others, key=others.__getitem__)]


def run_node(rendezvous: Rendezvous, num_cpus: int) -> int:
    """Add this node to the Ray cluster of the head until the run ends.

    Args:
        rendezvous: Options of the rendezvous.
        num_cpus: CPUs of this node for Ray.

    Returns:
        The exit code of the run.

    Raises:
        CommandError: The head has ended, rejects this node, or Ray cannot be started.
    """
    signals = StopSignals()
    try:
        signals.release()
        peer, invitation = connect_to_head(rendezvous)
        with _ray_node(invitation, num_cpus, rendezvous.local_address) as (process, log):
            print(
                f"drawbar: Node {invitation.node_rank} of the run at {invitation.address}.",
                file=sys.stderr,
            )
            return _wait_for_exit_code(peer, process, log)
    except KeyboardInterrupt:
        return signals.exit_code


@contextlib.contextmanager
def _ray_node(
    invitation: Invitation, num_cpus: int, local_address: str
) -> Iterator[tuple[subprocess.Popen[bytes], IO[bytes]]]:
    """Start Ray on this node, and stop it at the end."""
    variables = {"RAY_worker_niceness": "0"}
    if invitation.auth_mode:
        variables["RAY_AUTH_MODE"] = invitation.auth_mode
    # Otherwise, `ray start` would record the address, and `ray.init()` of other programs on this
    # node would use the cluster.
    with tempfile.TemporaryDirectory(prefix="ray_", ignore_cleanup_errors=True) as directory:
        command = [
            *(sys.executable, "-m", "ray.scripts.scripts", "start", "--block"),
            *(
                "--address",
                invitation.address,
                "--num-cpus",
                str(num_cpus),
                "--temp-dir",
                directory,
            ),
            *("--labels", f"{NODE_RANK_LABEL}={invitation.node_rank}", "--disable-usage-stats"),
            # Other nodes of the cluster may be on the same host.
            *("--min-worker-port", "0", "--max-worker-port", "0"),
            *("--dashboard-agent-listen-port", "0"),
            *(("--node-ip-address", local_address) if local_address else ()),
        ]
        with tempfile.TemporaryFile() as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**os.environ, **variables, "RAY_TMPDIR": directory},
                start_new_session=True,  # Ctrl-C must not reach it
            )
            try:
                yield process, log
            finally:
                process.terminate()
                try:
                    process.wait(_END_TIMEOUT_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def _wait_for_exit_code(peer: Peer, process: subprocess.Popen[bytes], log: IO[bytes]) -> int:
    """Wait for the end of the run, and return its exit code.

    Raises:
        CommandError: The head or Ray on this node has ended.
    """
    pidfd = os.pidfd_open(process.pid)
    with contextlib.closing(peer), selectors.DefaultSelector() as selector:
        selector.register(peer.connection, selectors.EVENT_READ)
        selector.register(pidfd, selectors.EVENT_READ)
        ready = [key.fileobj for key, _ in selector.select()]
        os.close(pidfd)
        if peer.connection in ready:
            try:
                return int(peer.receive()["exit_code"])
            except ConnectionError:
                raise CommandError(
                    "The command on the first node has ended, and the run with it."
                ) from None
        log.seek(0)
        lines = log.read().decode(errors="replace").strip().splitlines()
        raise CommandError(f"Ray on this node has ended: {lines[-1] if lines else 'no output'}")
