"""Keep the global batch size of a Trainer with any number of workers."""

from __future__ import annotations

from typing import Any, NoReturn

from transformers.trainer_utils import has_length

from drawbar.accelerate.integration import drop_incomplete_steps
from drawbar.train import get_context

_ATTRIBUTE = "_drawbar_global_batch_size"


def set_global_batch_size(trainer: Any, global_batch_size: int) -> None:
    """Set `gradient_accumulation_steps` for a global batch size.

    Args:
        trainer: The Trainer.
        global_batch_size: Number of samples per optimizer step, of all workers together.

    Raises:
        TypeError, ValueError: See `TrainContext.accumulation_steps`. Or the Trainer uses DeepSpeed.
    """
    args = trainer.args
    if args.deepspeed:
        raise ValueError(
            "prepare_trainer(global_batch_size=...) does not work with DeepSpeed, which reads "
            "gradient_accumulation_steps when TrainingArguments are created. Set TrainingArguments("
            "gradient_accumulation_steps=drawbar.train.get_context().accumulation_steps("
            f"{global_batch_size}, batch_size={args.per_device_train_batch_size}))."
        )
    args.gradient_accumulation_steps = get_context().accumulation_steps(
        global_batch_size, args.train_batch_size
    )
    setattr(trainer, _ATTRIBUTE, global_batch_size)


def is_in_global_batches(trainer: Any) -> bool:
    """Return whether a Trainer has a global batch size."""
    return hasattr(trainer, _ATTRIBUTE)


def drop_incomplete_global_batch(trainer: Any, loader: Any) -> None:
    """Let a training loader drop the samples of an incomplete last step.

    Args:
        trainer: The Trainer.
        loader: Its training loader. It is modified.

    Raises:
        ValueError: The loader has no length, or an incomplete last step without `drop_last`.
    """
    if not has_length(loader):
        raise_without_length(loader.dataset)
    drop_incomplete_steps(
        loader, getattr(trainer, _ATTRIBUTE), trainer.args.gradient_accumulation_steps
    )


def raise_without_length(data: object) -> NoReturn:
    """Raise the error for training data that has no length, or that is split already."""
    raise ValueError(
        f"prepare_trainer(global_batch_size=...) needs a train_dataset with a length, found "
        f"{type(data).__name__}. Use a datasets.Dataset or another dataset with __len__, or set "
        "TrainingArguments(gradient_accumulation_steps=...) yourself."
    )
