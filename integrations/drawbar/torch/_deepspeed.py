"""DeepSpeed on CPU workers."""

from __future__ import annotations


def disable_deepspeed_shm() -> None:
    """Prevent DeepSpeed from compiling its shared-memory all-reduce; gloo is used instead.

    DeepSpeed would compile it when it first sees a process group on CPUs. This needs a compiler and
    takes about a minute. If it is interrupted, every later run waits for the stale lock without a
    message.

    Example:
        ```python
        if args.deepspeed:
            disable_deepspeed_shm()
        ```
    """
    import deepspeed.ops

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
