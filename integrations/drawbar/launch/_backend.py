"""ScriptConfig and the rendezvous address of the scripts.

A script creates its process group itself, and rank 0 of it binds the port in MASTER_PORT. Until the
attempt ends, the rank's process reserves this port with a socket that is bound but does not listen,
so that no other process can get it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from drawbar._rendezvous import held_port
from drawbar.train import collective, get_context
from drawbar.train.backend import Backend, BackendConfig, get_worker_address


@dataclass(frozen=True)
class ScriptConfig(BackendConfig):
    """Backend of scripts, which set up their process group from torchrun's variables.

    Example:
        ```python
        DataParallelTrainer(train_func, backend_config=ScriptConfig())
        ```
    """

    @property
    def backend_cls(self) -> type[Backend]:
        """Backend class, whose hooks the controller calls."""
        return _ScriptBackend


class _ScriptBackend(Backend):
    """Backend of ScriptTrainer. Worker processes only start the script, so they are reused."""

    share_cuda_visible_devices = True
    can_reuse_processes = True


@contextmanager
def rendezvous_address() -> Iterator[tuple[str, int]]:
    """Reserve the rendezvous address and port of the scripts. Collective: call it on all ranks."""
    if get_context().get_world_rank() > 0:
        yield collective.broadcast_from_rank_zero(("", 0))
        return
    address = get_worker_address()
    with held_port(address) as port:
        yield collective.broadcast_from_rank_zero((address, port))
