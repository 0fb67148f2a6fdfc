"""Processes that torchrun, or `accelerate launch`, has started together."""

from __future__ import annotations

import functools
import os

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, not in its __all__
from torch.distributed.rendezvous import rendezvous

from drawbar.train.backend import LauncherStore


def is_multiprocess_torchrun() -> bool:
    """Whether this process is one of several that a torchrun has started."""
    return dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1


@functools.cache
def torchrun_store() -> LauncherStore:
    """Give the store that torchrun has made for this start of its processes."""
    store, _, _ = next(rendezvous("env://"))
    # The store is the agent's and outlives its workers: what those before a restart have put there
    # must not be found again.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    found: LauncherStore = PrefixStore(f"drawbar/{restart}", store)
    return found


def uses_torchrun_store() -> bool:
    """Whether the ranks are torchrun's, whose store stays at MASTER_ADDR and MASTER_PORT."""
    return torchrun_store.cache_info().currsize > 0
