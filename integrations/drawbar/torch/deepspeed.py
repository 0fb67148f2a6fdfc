"""For integrations that run DeepSpeed on CPU workers."""

from __future__ import annotations

from drawbar.train.backend import set_public_module

__all__ = ["disable_deepspeed_shm"]


def disable_deepspeed_shm() -> None:
    """Keep DeepSpeed from compiling an all-reduce of its own, which does what gloo does.

    It would do so as it meets a process group on CPUs for the first time. That takes a compiler and
    a minute, and if it is cut short, every later run waits for its lock without a word.
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


set_public_module(globals())
