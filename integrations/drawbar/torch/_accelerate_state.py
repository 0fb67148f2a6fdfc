"""Hugging Face Accelerate has its place in an attempt, and does not outlive it.

Accelerate keeps one state per process, made by the first `Accelerator`, and hands settings on in
environment variables. Both would stay in a process that goes on into the next attempt, with the
rank and the world size of before. With `num_workers=0` the process is the user's own, who gets back
what was there. DeepSpeed keeps far more, in many places, and has no way to drop it all.
"""

from __future__ import annotations

import os
import sys

from drawbar.torch._attempt_cleanup import on_attempt_end
from drawbar.train.backend import retire_process

_PREFIXES = ("ACCELERATE_", "FSDP_")


def reset_accelerate_state() -> None:
    """Begin without the state of Accelerate that the process has; put it back at the end."""
    on_attempt_end(_restore_state, _accelerate_env(), _save_and_clear_states())
    on_attempt_end(_retire_process_after_deepspeed)


def _accelerate_env() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}


def _shared_states() -> list[dict[str, object]]:
    """Give the dicts that Accelerate's singletons share, if it has been imported."""
    module = sys.modules.get("accelerate.state")
    names = ("PartialState", "AcceleratorState", "GradientState")
    return [getattr(module, name)._shared_state for name in names] if module else []


def _save_and_clear_states() -> list[dict[str, object]]:
    taken = [dict(state) for state in _shared_states()]
    for state in _shared_states():
        state.clear()
    return taken


def _restore_state(variables: dict[str, str], states: list[dict[str, object]]) -> None:
    for name in _accelerate_env().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    for index, state in enumerate(_shared_states()):
        state.clear()
        state.update(states[index] if states else {})


def _retire_process_after_deepspeed() -> None:
    if getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None) is not None:
        retire_process()
