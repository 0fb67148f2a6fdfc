"""Create and destroy the default process group of an attempt.

**Creation.** Rank 0 binds a store to a free port and then sends its address to the other ranks, so
no port is guessed. Only the group holds a reference to the store. So the process behaves as in
plain PyTorch: code that destroys the group and calls `init_process_group("gloo")` again finds the
port free, and MASTER_ADDR, MASTER_PORT, RANK, and WORLD_SIZE set. torchrun's
TORCHELASTIC_USE_AGENT_STORE is not needed, and would mislead groups that a library creates itself,
for example an inference engine in the same job.

**Destruction.** A failed rank must not leave the others waiting in a collective. gloo has no abort:
its connections close when the last reference to the group is dropped, and the other ranks then get
an error immediately. References are held by

- DDP models, and through them by frames of the traceback and by reference cycles,
- functions of modules that are imported while a group exists and have it as a default argument, for
  example `torch.distributed.nn.functional`.

All of these are released here. It must be fast, because Drawbar keeps a rank that stops within one
second of another rank's failure. So objects that exist before the training function starts are
frozen, and the garbage collector only checks newer ones: less than 1 ms instead of 0.3 s.
"""

from __future__ import annotations

import gc
import os
import socket
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from types import FunctionType

import psutil
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in its __all__
from torch.nn.parallel import DistributedDataParallel

from drawbar.torch._attempt_cleanup import on_attempt_end, restore_env, set_env
from drawbar.torch._compat import abort_default_group, forget_groups
from drawbar.torch._flight_recorder import flight_recorder
from drawbar.torch._replica_group import CollectiveTimeout, open_store
from drawbar.train import TrainContext, collective, get_context
from drawbar.train.backend import attempt_local, get_recovery, get_worker_address

_LAZY_VARIABLE = "TORCH_GLOO_LAZY_INIT"

_owns_default_group = False
"""Whether this module created the default group of this process."""


@contextmanager
def process_group(
    backend: str,
    timeout: timedelta,
    device: torch.device,
    *,
    set_master_env: bool,
    before_init: Callable[[], None] = lambda: None,
) -> Iterator[None]:
    """Create the default process group of all ranks, and destroy it on exit.

    If the body returns, the last collectives are finished first. After an error, this does not wait
    for other ranks.

    Args:
        backend: Backend of `torch.distributed`.
        timeout: Maximum time that ranks wait for each other, here and in collectives.
        device: Device of the worker. NCCL is bound to it, so that it fails here and not in the
            first collective.
        set_master_env: Whether to set MASTER_ADDR and MASTER_PORT.
        before_init: Callback after the store is created and MASTER_ADDR is set, for example to
            import a package that registers a backend.

    Raises:
        RuntimeError: The user has already created a default group in this process.
    """
    _ensure_no_group()
    # Imported modules are permanent, so the collection in `_abort_group` can skip their objects. If
    # the user has frozen objects, do not change that.
    if not gc.get_freeze_count():
        on_attempt_end(gc.unfreeze)
        gc.freeze()
    on_attempt_end(_abort_group)
    attempt_local(CollectiveTimeout).value = timeout
    try:
        store = _create_store(get_context(), timeout)
        _set_env(store, set_master_env=set_master_env)
        before_init()
        with flight_recorder():
            _init_process_group(backend, store, timeout, device)
            collective.barrier()  # gloo may still connect: no rank may leave before all have joined
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
    # Set this first, so that a group that an interrupt left incomplete is also cleaned up.
    context, _owns_default_group = get_context(), True
    with _lazy_connections() if _is_joining() else nullcontext():
        dist.init_process_group(
            backend,
            store=store,
            rank=context.get_world_rank(),
            world_size=context.get_world_size(),
            timeout=timeout,
            device_id=nccl_device(backend, device),
        )


@contextmanager
def _lazy_connections() -> Iterator[None]:
    """Let gloo connect when it is used: the other ranks train, and do not connect to this group."""
    previous = os.environ.get(_LAZY_VARIABLE)
    os.environ[_LAZY_VARIABLE] = "1"
    try:
        yield
    finally:
        restore_env(_LAZY_VARIABLE, previous)


def _is_joining() -> bool:
    """Return whether this process replaces a dead rank of an attempt that continues."""
    recovery = get_recovery()
    return recovery is not None and recovery.is_joining


def nccl_device(backend: str, device: torch.device) -> torch.device | None:
    """Return the device to which a process group is bound; None for backends without NCCL.

    NCCL of torch 2.15 would take its device from LOCAL_RANK otherwise, and Ray may have assigned
    another one.

    Args:
        backend: Backend of `torch.distributed`.
        device: Device of this worker.

    Returns:
        The device or None.

    Example:
        >>> nccl_device("cpu:gloo,cuda:nccl", torch.device("cuda", 1))
        device(type='cuda', index=1)
    """
    return device if device.type == "cuda" and "nccl" in backend else None


def _create_store(context: TrainContext, timeout: timedelta) -> TCPStore:
    size = context.get_world_size()
    is_joining = _is_joining()
    if context.get_world_rank() > 0:
        host, port = collective.broadcast_from_rank_zero(("", 0))
        if is_joining:  # rank 0 may be dead
            return open_store(get_worker_address())
        return TCPStore(host, port, size, is_master=False, timeout=timeout)
    # Do not wait for the other ranks here: they do not know the address yet.
    store = TCPStore(
        get_worker_address(),
        0,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=False,
        multi_tenant=True,  # like plain PyTorch, so that torch.distributed.rpc can share the port
    )
    collective.broadcast_from_rank_zero((store.host, store.port))
    return store


def network_interface_to(host: str, port: int) -> str | None:
    """Return the network interface through which this node reaches an address; None if unknown.

    By default, gloo uses the interface of the node's host name, which other nodes cannot reach on
    many machines.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # a datagram socket only selects the route and sends nothing
            local_address = str(probe.getsockname()[0])
    except OSError:
        return None
    for name, addresses in psutil.net_if_addrs().items():
        if local_address in (entry.address.partition("%")[0] for entry in addresses):
            return str(name)
    return None


def _ensure_no_group() -> None:
    if _owns_default_group:
        _abort_group()  # an interrupt stopped the cleanup of the previous attempt
    if dist.is_initialized():
        raise RuntimeError(
            "torch.distributed is already initialized in this process, so the run cannot create "
            "its process group. Call torch.distributed.destroy_process_group() before fit()."
        )
    forget_groups()


def _destroy_group(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # queued collectives still need this rank
    if dist.is_initialized():
        _let_models_delete_reducers_first()
        _release_default_arguments(dist.group.WORLD)
        dist.destroy_process_group()


def _abort_group() -> None:
    """Destroy the group without waiting for other ranks."""
    global _owns_default_group
    _let_models_delete_reducers_first()
    # Collect before the connections close, so that errors of other ranks come after this rank's.
    gc.collect()
    if dist.is_initialized():
        _release_default_arguments(dist.group.WORLD)
        abort_default_group()
    _owns_default_group = False


def _let_models_delete_reducers_first() -> None:
    """Let each DDP model delete its reducer before its own reference to the group.

    Deleting the last reference waits for gloo's thread, which may need the GIL to delete the
    tensors of the last collective. The reducer would wait with the GIL held, which is a deadlock.
    Python's reference to the group releases the GIL.
    """
    for model in gc.get_objects():
        if issubclass(type(model), DistributedDataParallel) and "process_group" in vars(model):
            # Attributes are deleted in their order.
            vars(model)["process_group"] = vars(model).pop("process_group")


def _release_default_arguments(group: object) -> None:
    """Replace the group by None in the default arguments of all functions that store it.

    Functions of `torch.distributed` use the current default group for None.
    """
    for function in gc.get_objects():
        # isinstance() would run code of the object: dead weak proxies raise, old names warn.
        defaults = (type(function) is FunctionType and function.__defaults__) or ()
        if any(value is group for value in defaults):
            function.__defaults__ = tuple(None if value is group else value for value in defaults)


def _clear_traceback_locals(error: BaseException | None) -> None:
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__


def _add_peer_failure_note(error: BaseException) -> None:
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "gloo/transport" not in text and "remote process exited" not in text:
        return
    if "Timed out" in text:
        error.add_note(
            "This rank waited in a collective until the timeout. Another rank is slow or does not "
            "call this collective. If it is only slow, raise TorchConfig(timeout_s=...)."
        )
        return
    error.add_note(
        "This rank was in a collective when another rank failed or left its training function."
    )
