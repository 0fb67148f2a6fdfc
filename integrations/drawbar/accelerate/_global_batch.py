"""set_global_batch_size: keep the global batch size with any number of workers."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader

from drawbar.accelerate._compat import get_prepared_loaders
from drawbar.accelerate._data_position import find_sampler
from drawbar.accelerate._prepare import check_accelerator
from drawbar.torch.integration import check_epoch_size, drop_incomplete_step
from drawbar.train import get_context


def set_global_batch_size(
    accelerator: Accelerator, data_loader: DataLoader[Any], global_batch_size: int
) -> int:
    """Set `gradient_accumulation_steps` so that the global batch size does not change.

    Call it after `accelerator.prepare()`, and train in `with accelerator.accumulate(model):`. Each
    optimizer step then uses the same samples with any number of workers, also in an elastic run
    and after a restart with another number. For the same order of samples, use
    `DataLoaderConfiguration(use_seedable_sampler=True)`.

    Args:
        accelerator: The Accelerator.
        data_loader: Training data loader that it has prepared.
        global_batch_size: Number of samples per optimizer step, of all workers together.

    Returns:
        The number of batches of this worker per optimizer step: `global_batch_size` divided by
        the batch size of the loader and by the number of workers. After a restart, skip this
        number of batches per step of the checkpoint with `accelerator.skip_first_batches()`.

    Raises:
        RuntimeError: Called outside a training function, or the Accelerator does not match the
            worker. See `check_accelerator()`.
        TypeError: `global_batch_size` is not an int.
        ValueError: `global_batch_size` is not a multiple of the batch size of the loader times the
            number of workers; or `data_loader` is not prepared, or has no batch size; or its
            number of samples is not a multiple of `global_batch_size` and `drop_last` is not set;
            or the Accelerator uses DeepSpeed.

    Example:
        ```python
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        set_global_batch_size(accelerator, loader, 48)
        ```
    """
    check_accelerator(accelerator)
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(
            "set_global_batch_size() does not work with DeepSpeed, which reads "
            "gradient_accumulation_steps in accelerator.prepare(). Set Accelerator("
            "gradient_accumulation_steps=drawbar.train.get_context().accumulation_steps("
            f"{global_batch_size}, batch_size))."
        )
    if not any(each is data_loader for each in get_prepared_loaders(accelerator)):
        raise ValueError(
            "set_global_batch_size() needs a data loader from accelerator.prepare(). Pass the "
            "loader that prepare() returns."
        )
    batches: Any = data_loader.batch_sampler
    batch_size = getattr(batches, "batch_size", None)
    if batch_size is None or getattr(batches, "split_batches", False):
        raise ValueError(
            "set_global_batch_size() needs a data loader with batch_size= and a dataset with a "
            "length, and Accelerator without split_batches=True and dispatch_batches=True."
        )
    steps = get_context().accumulation_steps(global_batch_size, batch_size)
    drop_incomplete_steps(data_loader, global_batch_size, steps)
    accelerator.gradient_accumulation_steps = steps
    return steps


def drop_incomplete_steps(loader: Any, global_batch_size: int, accumulation_steps: int) -> None:
    """Let a loader that Accelerate has prepared drop the samples of an incomplete last step.

    Args:
        loader: The data loader. It is modified.
        global_batch_size: Number of samples per optimizer step, of all workers together.
        accumulation_steps: Number of batches of this worker per optimizer step.

    Raises:
        ValueError: There is an incomplete last step, but `drop_last` is not set.

    Example:
        >>> drop_incomplete_steps(loader, global_batch_size=48, accumulation_steps=6)
    """
    batches = loader.batch_sampler
    check_epoch_size(len(find_sampler(loader)), global_batch_size, drop_last=batches.drop_last)
    drop_incomplete_step(batches, accumulation_steps)
