"""Transfer of the callbacks' state from a worker's Trainer to the driver's Trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch

from drawbar.lightning._model_checkpoint import REPLACED_ATTRIBUTES

if TYPE_CHECKING:
    from lightning.pytorch import Callback

_SCALARS = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(Path, Enum, datetime, timedelta, np.generic, np.ndarray),
)
_CONTAINERS = (list, tuple, set, frozenset)


@dataclass(frozen=True)
class CallbackState:
    """State of a callback in a worker: its `state_dict()` and its public plain attributes.

    `state_dict()` alone is not enough: `ModelCheckpoint` does not restore `current_score` from
    it, and most user-defined callbacks do not implement it.
    """

    state: dict[str, object]
    attributes: dict[str, object]

    @classmethod
    def of(cls, callback: Callback) -> Self:
        """Collect the state of a callback, with tensors on the CPU."""
        state = callback.state_dict()
        replaced = REPLACED_ATTRIBUTES if "dirpath" in state else ()
        attributes = {}
        for name, value in vars(callback).items():
            if not name.startswith("_") and name not in replaced:
                try:
                    attributes[name] = _copy_plain(value)
                except TypeError:
                    continue  # the driver keeps its existing value
        return cls(state, attributes)

    def load_into(self, callback: Any, *, fitted: bool) -> None:
        """Load the state into the driver's callback.

        Args:
            callback: The callback that was sent to the workers.
            fitted: Whether the workers ran `fit`. Otherwise, `ModelCheckpoint` keeps its directory,
                because its checkpoints belong to an earlier run.
        """
        state = dict(self.state)
        if "dirpath" in state:
            # ModelCheckpoint does not load its scores if the directories differ.
            if fitted:
                callback.dirpath = state["dirpath"]
            else:
                state["dirpath"] = callback.dirpath
        if state:
            callback.load_state_dict(state)
        vars(callback).update(self.attributes)


def collect_callbacks(trainer: Any, sent: Sequence[Callback]) -> list[CallbackState]:
    """Collect the state of the callbacks that the driver has sent.

    Args:
        trainer: The worker's Trainer. Its module's `configure_callbacks` may have replaced some.
        sent: Callbacks as they were received from the driver.
    """
    # state_key identifies a callback by its type, or by its type and its settings.
    replacements = {callback.state_key: callback for callback in trainer.callbacks}
    current = [
        callback
        if any(callback is other for other in trainer.callbacks)
        else replacements.get(callback.state_key, callback)
        for callback in sent
    ]
    return [CallbackState.of(callback) for callback in current]


def _copy_plain(value: Any) -> Any:
    """Copy numbers, strings, arrays, tensors, and built-in containers of these.

    Raises:
        TypeError: The value contains another kind of object, which may be large or unpicklable.
    """
    if isinstance(value, _SCALARS):
        return value
    if type(value) is torch.Tensor:
        return value.detach().cpu()
    if type(value) is dict:
        return {_copy_plain(key): _copy_plain(item) for key, item in value.items()}
    if type(value) in _CONTAINERS:
        return type(value)(_copy_plain(item) for item in value)
    raise TypeError(f"not plain data: {type(value).__name__}")
