"""Hugging Face Accelerate has its place in an attempt, and does not outlive it.

Accelerate keeps one state per process, made by the first `Accelerator`, and hands settings on in
environment variables. Both would stay in a process that goes on into the next attempt, with the
rank and the world size of before. With `num_workers=0` the process is the user's own, who gets back
what was there. DeepSpeed keeps far more, in many places, and has no way to drop it all.
"""

from __future__ import annotations

import os
import sys

from drawbar.torch._undo import at_end
from drawbar.train.backend import retire_process

_PREFIXES = ("ACCELERATE_", "FSDP_")


def accelerate_anew() -> None:
    """Begin without the state of Accelerate that the process has; put it back at the end."""
    at_end(_restore, _variables(), _take_states())
    at_end(_retire_after_deepspeed)


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_PREFIXES)}


def _states() -> list[dict[str, object]]:
    """Give the dicts that Accelerate's singletons share, if it has been imported."""
    module = sys.modules.get("accelerate.state")
    names = ("PartialState", "AcceleratorState", "GradientState")
    return [getattr(module, name)._shared_state for name in names] if module else []


def _take_states() -> list[dict[str, object]]:
    taken = [dict(state) for state in _states()]
    for state in _states():
        state.clear()
    return taken


def _restore(variables: dict[str, str], states: list[dict[str, object]]) -> None:
    for name in _variables().keys() - variables.keys():
        del os.environ[name]
    os.environ.update(variables)
    for index, state in enumerate(_states()):
        state.clear()
        state.update(states[index] if states else {})


def _retire_after_deepspeed() -> None:
    if getattr(sys.modules.get("deepspeed.comm.comm"), "cdb", None) is not None:
        retire_process()
