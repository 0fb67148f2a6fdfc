"""Reset the process-wide state of Hugging Face Accelerate around an attempt.

The first `Accelerator` of a process creates a shared state and passes settings in environment
variables. A process that runs several attempts would keep both, with the previous rank and world
size. With `num_workers=0` the process belongs to the user, so the previous state is restored.
DeepSpeed keeps state in many places and cannot be reset, so its processes are not reused.
"""

from __future__ import annotations

import os
import sys

from drawbar.torch._attempt_cleanup import on_attempt_end
from drawbar.torch._compat import get_accelerate_states
from drawbar.train.backend import retire_process

_PREFIXES = ("ACCELERATE_", "FSDP_")


def reset_accelerate_state() -> None:
    """Clear Accelerate's state now and restore it at the end of the attempt."""
    on_attempt_end(_restore_state, _accelerate_env(), _save_and_clear_states())
    on_attempt_end(_retire_process_after_deepspeed)


def _accelerate_env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}


def _save_and_clear_states() -> list[dict[str, object]]:
    saved = [dict(state) for state in get_accelerate_states()]
    for state in get_accelerate_states():
        state.clear()
    return saved


def _restore_state(variables: dict[str, str], states: list[dict[str, object]]) -> None:
    for name in _accelerate_env().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    for index, state in enumerate(get_accelerate_states()):
        state.clear()
        state.update(states[index] if states else {})


def _retire_process_after_deepspeed() -> None:
    if getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None) is not None:
        retire_process()
