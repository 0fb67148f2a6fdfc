"""The default process group of one attempt: how the ranks meet, and how they part.

**Meeting.** Rank 0 binds a store to a free port and then tells the others where it is, so no port
is guessed. The group itself holds the only reference to the store. What follows is what plain
PyTorch does: code that destroys the group and calls `init_process_group("gloo")` again finds the
port free and MASTER_ADDR, MASTER_PORT, RANK and WORLD_SIZE set. torchrun's
TORCHELASTIC_USE_AGENT_STORE is not needed for that, and would mislead groups that a library makes
by itself, such as those of an inference engine in the same job.

**Parting.** A rank that fails must not leave the others waiting for it in a collective. gloo has
no abort: its connections close when the last reference to the group goes, and the other ranks then
get an error at once. References are held by DDP models, hence by the frames of the traceback and by
reference cycles; and by modules of torch that, imported while a group is up, keep it as the default
value of an argument. All three are seen to here, fast: a rank that has stopped within a second of
another's failure is kept. So what is alive before the function starts is frozen, and the garbage
collector looks only at what came after: a fraction of a millisecond instead of 0.3 seconds.
"""

from __future__ import annotations

import gc
import importlib
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its __all__

from drawbar.torch._attempt_cleanup import on_attempt_end, set_env
from drawbar.train import TrainContext, collective, get_context
from drawbar.train.backend import get_worker_address

_PREIMPORTED_MODULES = (
    "torch.distributed.nn.functional",  # these two keep the default group
    "torch.distributed.fsdp.sharded_grad_scaler",
    "torch._dynamo",  # large, and every optimizer imports it
)

_owns_default_group = False
"""Whether the default group of this process is one made here."""


@contextmanager
def process_group(
    backend: str,
    timeout: timedelta,
    device: torch.device,
    *,
    set_master_env: bool,
    before_init: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Make the default process group of all ranks, and take it down on the way out.

    A function that returned has its last collectives finished; after an error nobody is waited for.

    Args:
        backend: Backend of `torch.distributed`.
        timeout: How long the ranks wait for each other, here and in collectives.
        device: The worker's device; NCCL is bound to it, and fails here rather than in the first
            collective.
        publish: Whether to set MASTER_ADDR and MASTER_PORT.
        before_init: Called when the store is up and published: the place to load a package that has
            a backend.

    Raises:
        RuntimeError: The process has a default group of the user's own.
    """
    _ensure_no_group()
    for module in _PREIMPORTED_MODULES:
        importlib.import_module(module)
    # What the imports have made stays: the collection in `_leave` need not go through it. A
    # freeze of the user's is left as it is.
    if not gc.get_freeze_count():
        on_attempt_end(gc.unfreeze)
        gc.freeze()
    on_attempt_end(_abort_group)
    try:
        store = _create_store(get_context(), timeout)
        _set_env(store, set_master_env=set_master_env)
        before_init()
        _init_process_group(backend, store, timeout, device)
        collective.barrier()  # gloo may still connect: nobody leaves before all have joined
        del store
        yield
        _destroy_group(device)
    except BaseException as error:
        _add_peer_failure_note(error)
        if get_context().get_world_size() > 1:
            _clear_traceback_locals(error)
        raise


def _set_env(store: TCPStore, *, set_master_env: bool) -> None:
    if set_master_env:
        set_env("MASTER_ADDR", store.host)
        set_env("MASTER_PORT", str(store.port))
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        interface = network_interface_to(store.host, store.port)
        if interface is not None:
            set_env("GLOO_SOCKET_IFNAME", interface)


def _init_process_group(
    backend: str, store: TCPStore, timeout: timedelta, device: torch.device
) -> None:
    global _owns_default_group
    # Before there is a group: one that an interrupt has left half made is ours as well.
    context, _owns_default_group = get_context(), True
    dist.init_process_group(
        backend,
        store=store,
        rank=context.get_world_rank(),
        world_size=context.get_world_size(),
        timeout=timeout,
        device_id=device if device.type == "cuda" and "nccl" in backend else None,
    )


def _create_store(context: TrainContext, timeout: timedelta) -> TCPStore:
    size = context.get_world_size()
    if context.get_world_rank() > 0:
        host, port = collective.broadcast_from_rank_zero(("", 0))
        return TCPStore(host, port, size, is_master=False, timeout=timeout)
    # It must not wait for the others here, who do not know yet where it is.
    store = TCPStore(
        get_worker_address(),
        0,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,  # as in plain PyTorch: torch.distributed.rpc may share the port
    )
    collective.broadcast_from_rank_zero((store.host, store.port))
    return store


def network_interface_to(host: str, port: int) -> str | None:
    """Name the network interface by which this node reaches an address, or None if unknown.

    gloo by itself takes the interface that the node's own name resolves to, which on many machines
    is one that other nodes cannot reach.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # of a datagram socket: sends nothing, only chooses the route
            own = str(probe.getsockname()[0])
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if own in (each.address.partition("%")[0] for each in addresses):
            return str(name)
    return None


def _ensure_no_group() -> None:
    if _owns_default_group:
        _abort_group()  # an interrupt cut short how the attempt before left its group
    if dist.is_initialized():
        raise RuntimeError(
            "this process has a default process group already, so the run cannot make its own; "
            "call torch.distributed.destroy_process_group() before fit()"
        )


def _destroy_group(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # collectives that are still queued need this rank
    if dist.is_initialized():
        dist.destroy_process_group()


def _abort_group() -> None:
    """Let the group go without waiting for other ranks."""
    global _owns_default_group
    gc.collect()  # before the connections close: the others' errors then come after this rank's own
    if dist.is_initialized():
        # Destroying would wait for collectives of NCCL that can never end.
        abort = getattr(dist.distributed_c10d, "_abort_process_group", dist.destroy_process_group)
        abort()
    _owns_default_group = False


def _clear_traceback_locals(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _add_peer_failure_note(error: BaseException) -> None:
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "gloo/transport" in text or "remote process exited" in text:
        error.add_note(
            "This rank was in a collective when another rank failed or left its training function."
        )
