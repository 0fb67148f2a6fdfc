"""The addresses at which others reach this process's node."""

from __future__ import annotations

from drawbar.train._worker.context import get_context

LOOPBACK = "127.0.0.1"


def get_node_address() -> str:
    """Give the address at which the Ray cluster's other nodes reach this one; in any process.

    For frameworks that need something in the controller, such as a tracker. In the training
    function it is `worker_address`.
    """
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # Ray has no types here


def get_worker_address() -> str:
    """Give the address at which the run's other workers reach this one.

    The loopback if all of them are on one node: that is there without any network, and no VPN or
    firewall stands before it.

    Raises:
        RuntimeError: Called outside a training function.
    """
    context = get_context()
    on_one_node = context.get_local_world_size() == context.get_world_size()
    return LOOPBACK if on_one_node else get_node_address()
