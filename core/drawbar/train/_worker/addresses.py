"""Network addresses of this node and worker."""

from __future__ import annotations

from drawbar.train._worker.context import get_context

LOOPBACK = "127.0.0.1"


def get_node_address() -> str:
    """Return the address of this node in the Ray cluster. Works in any process.

    For frameworks that start a service in the controller, such as a tracker. In the training
    function, use `get_worker_address()`.

    Returns:
        IP address at which other nodes reach this node.

    Example:
        >>> tracker_uri = f"{get_node_address()}:{port}"
    """
    import ray

    return str(ray.util.get_node_ip_address())  # type: ignore[no-untyped-call]  # Ray has no types here


def get_worker_address() -> str:
    """Return the address at which the other workers of the run reach this worker.

    Returns:
        The loopback address if all workers are on one node, because it needs no network and no
        firewall or VPN blocks it. Otherwise, the IP address of this node.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        >>> address = broadcast_from_rank_zero(f"{get_worker_address()}:{port}")
    """
    context = get_context()
    on_one_node = context.get_local_world_size() == context.get_world_size()
    return LOOPBACK if on_one_node else get_node_address()
