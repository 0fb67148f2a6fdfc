"""Restore the order of samplers and streams that Transformers does not restore.

Transformers repeats the order of an interrupted epoch only with `set_epoch`. The order of others,
such as the sampler of `group_by_length`, depends on a random generator. A restart would begin with
another order: some samples of the epoch would be trained twice and others never.
"""

from __future__ import annotations

import base64
import math
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import IterableDatasetShard
from torch.utils.data import IterableDataset
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import has_length

from drawbar.accelerate.integration import find_sampler
from drawbar.train.backend import register_data_position
from drawbar.transformers._stream import StreamLoader

_NAME = "transformers.sampler"


class SamplerOrderCallback(TrainerCallback):
    """Store the state of the generator of a sampler or stream in checkpoints, and restore it.

    Within an epoch, this is the state at its start, because the trained batches are skipped.
    Without an own generator, this is PyTorch's global one, whose state is restored after skipping.
    """

    def __init__(self) -> None:
        self._generator: torch.Generator | None = None
        self._epoch_start: torch.Tensor | None = None
        self._restored: torch.Tensor | None = None
        self._stream: StreamLoader | None = None

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Read the state in the checkpoint from which the Trainer resumes."""
        loader = kwargs["train_dataloader"]
        self._stream = loader if isinstance(loader, StreamLoader) else None
        is_skipped = self._stream is not None or (has_length(loader) and not args.ignore_data_skip)
        sampler = _find_source_of_order(loader)
        if not is_skipped or hasattr(sampler, "set_epoch"):
            return
        generator = getattr(sampler, "generator", None)
        self._generator = generator or torch.default_generator
        if self._stream is not None:
            self._stream.before_epoch = self._start_epoch  # type: ignore[method-assign]

        def get_position() -> dict[str, object] | None:
            is_epoch_end = self._is_epoch_end(loader, state, args)
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
        if self._generator is not None and self._stream is None:
            self._start_epoch()

    def _start_epoch(self) -> None:
        assert self._generator is not None
        if self._restored is not None:
            self._generator.set_state(self._restored)
            self._restored = None
        self._epoch_start = self._get_state()

    def _is_epoch_end(self, loader: Any, state: TrainerState, args: TrainingArguments) -> bool:
        if self._stream is not None:
            return self._stream.position()[1] == 0
        return state.global_step % math.ceil(len(loader) / args.gradient_accumulation_steps) == 0

    def _get_state(self) -> torch.Tensor | None:
        return None if self._generator is None else self._generator.get_state()


def _find_source_of_order(loader: Any) -> Any:
    """Return the stream, or else the sampler of a data loader."""
    dataset = getattr(loader, "dataset", None)
    if isinstance(dataset, IterableDatasetShard):
        dataset = dataset.dataset
    return dataset if isinstance(dataset, IterableDataset) else find_sampler(loader)
