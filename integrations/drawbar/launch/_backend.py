"""How the ranks of a script meet: at an address that torchrun's variables tell.

A script makes its process group itself, and binds the port itself: with torch it is rank 0 that
does. So the port is held for it until the attempt ends, by a socket that is bound but does not
listen, and only then told. What no other process gets, the script does.
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
    """Nothing is made for a script: it gets torchrun's variables, and meets by itself."""

    @property
    def backend_cls(self) -> type[Backend]:
        """The class with the controller's part, of which there is none."""
        return _ScriptBackend


class _ScriptBackend(Backend):
    """A rank's process only starts the script's, so it can start another one."""

    share_cuda_visible_devices = True
    can_reuse_processes = True


@contextmanager
def rendezvous_address() -> Iterator[tuple[str, int]]:
    """Give the address and the port that the ranks' scripts meet at; a collective."""
    if get_context().get_world_rank() > 0:
        yield collective.broadcast_from_rank_zero(("", 0))
        return
    address = get_worker_address()
    with held_port(address) as port:
        yield collective.broadcast_from_rank_zero((address, port))
