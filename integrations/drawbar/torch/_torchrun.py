"""Detect processes started by torchrun or `accelerate launch`."""

from __future__ import annotations

import functools
import os

import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, not in its __all__
from torch.distributed.rendezvous import rendezvous

from drawbar.train.backend import LauncherStore


def is_multiprocess_torchrun() -> bool:
    """Return whether torchrun started this process as one of several."""
    return dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1


@functools.cache
def torchrun_store() -> LauncherStore:
    """Return torchrun's store for this start of its processes."""
    store, _, _ = next(rendezvous("env://"))
    # The store belongs to the agent and outlives the workers. Use a new prefix after a restart, so
    # that keys of previous workers are not read.
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    prefix_store: LauncherStore = PrefixStore(f"drawbar/{restart}", store)
    return prefix_store


def uses_torchrun_store() -> bool:
    """Return whether the ranks are torchrun processes, so that MASTER_ADDR must not change."""
    return torchrun_store.cache_info().currsize > 0
