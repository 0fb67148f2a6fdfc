"""Restore the order of samplers that Transformers does not restore.

Transformers repeats the order of an interrupted epoch only for samplers with `set_epoch`. The order
of others, such as the one of `group_by_length`, depends on a random generator. A restart would
begin with the order of epoch 0: some samples of the epoch would be trained twice and others never.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import torch
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from drawbar.accelerate.integration import find_sampler
from drawbar.train.backend import register_data_position

_NAME = "transformers.sampler"


class SamplerOrderCallback(TrainerCallback):
    """Store the state of the sampler's generator in checkpoints, and restore it.

    Within an epoch, this is the state at its start: the Trainer skips the trained batches. Samplers
    without a generator use PyTorch's global one, which the Trainer restores after this.
    """

    def __init__(self) -> None:
        self._generator: torch.Generator | None = None
        self._epoch_start: torch.Tensor | None = None
        self._restored: torch.Tensor | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Read the state in the checkpoint from which the Trainer resumes."""
        loader = kwargs["train_dataloader"]
        if isinstance(getattr(loader, "dataset", None), IterableDataset):
            return
        sampler = find_sampler(loader)
        if hasattr(sampler, "set_epoch"):
            return
        generator = getattr(sampler, "generator", None)
        self._generator = generator or torch.default_generator
        steps_per_epoch = math.ceil(len(loader) / args.gradient_accumulation_steps)

        def get_position() -> dict[str, object] | None:
            is_epoch_end = state.global_step % steps_per_epoch == 0
            start = self._get_state() if is_epoch_end else self._epoch_start
            # At the end of an epoch, the Trainer itself restores the global generator.
            if start is None or (is_epoch_end and generator is None):
                return None
            encoded = base64.b64encode(start.numpy().tobytes()).decode()
            return {"step": state.global_step, "state": encoded}

        position = register_data_position(_NAME, get_position, add_index=True)
        if position is not None and position["step"] == state.global_step:
            values = np.frombuffer(base64.b64decode(position["state"]), dtype=np.uint8)
            self._restored = torch.from_numpy(values.copy())

    def on_epoch_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Restore the state before the sampler is iterated."""
        if self._generator is None:
            return
        if self._restored is not None:
            self._generator.set_state(self._restored)
            self._restored = None
        self._epoch_start = self._get_state()

    def _get_state(self) -> torch.Tensor | None:
        return None if self._generator is None else self._generator.get_state()
