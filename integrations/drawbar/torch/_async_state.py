"""save_async and load_state: checkpoints that do not stop training while they are written."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from drawbar.torch._tensors import iter_tensors
from drawbar.train import ValidationTaskConfig, get_context, report
from drawbar.train.backend import MemoryFiles, get_agreed_checkpoint, report_async

STATE_FILE = "state.pt"
"""File of a state without DTensors, which `torch.load` reads."""

_DCP_METADATA_FILE = ".metadata"


def save_async(
    state: Mapping[str, object],
    metrics: Mapping[str, object] | None = None,
    validation: bool | ValidationTaskConfig = False,
) -> float:
    """Copy a state to memory, report it as a checkpoint, and continue while it is written.

    Call it on all ranks. The checkpoint has the values of the call: the training function may
    change the state immediately. A separate process with low priority writes it to storage, and
    then it is committed. The next call waits until it is written. The run waits for the last one.

    If the state contains DTensors, as with FSDP2, all ranks save their parts with
    `torch.distributed.checkpoint`. Otherwise rank 0 saves the file `state.pt`.

    The memory of two copies is kept for the next calls. The first two calls take several times as
    long as the next ones, because the memory is new. If a rank dies, the restart reads the last
    checkpoint from memory, if this node still has it.

    Args:
        state: State dicts, tensors, and other objects that `torch.save` accepts, by name.
        metrics: See `drawbar.train.report()`. Default: none.
        validation: See `drawbar.train.report()`.

    Returns:
        Seconds for which this call has stopped training.

    Raises:
        RuntimeError: Called outside a training function.
        TypeError: `state` or `metrics` is not a mapping, or `state` contains a module or an
            optimizer.
        CheckpointError: The process that wrote the previous checkpoint was killed.
        StorageError: The previous checkpoint could not be written, for example to a full disk.
        OSError: There is not enough memory for the copy.

    Example:
        ```python
        for epoch in range(start_epoch, num_epochs):
            loss = train_one_epoch(model, optimizer)
            model_state, optimizer_state = get_state_dict(model, optimizer)
            save_async(
                {"model": model_state, "optimizer": optimizer_state, "epoch": epoch},
                {"loss": loss},
            )
        ```
    """
    _check_state(state)
    metrics = {} if metrics is None else metrics
    if not isinstance(metrics, Mapping):
        raise TypeError(f"save_async(state, metrics) takes a dict of metrics, found {metrics!r}")
    if _has_dtensor(state):
        return report_async(metrics, partial(_save_shards, state), validation)
    if get_context().get_world_rank() == 0:
        return report_async(metrics, partial(_save_file, state), validation)
    report(metrics)
    return 0.0


def _check_state(state: object) -> None:
    if not isinstance(state, Mapping):
        raise TypeError(
            f"save_async(state) must be a dict, found {type(state).__name__}. Use "
            'save_async({"model": model.state_dict()}), for example.'
        )
    for name, value in state.items():
        if hasattr(value, "state_dict"):
            raise TypeError(
                f"save_async() cannot save state[{name!r}], a {type(value).__name__}. Pass its "
                "state_dict() instead."
            )


def _has_dtensor(state: object) -> bool:
    # Without the import of DTensor, which takes time.
    return any(hasattr(tensor, "full_tensor") for tensor in iter_tensors(state))


def _save_file(state: Mapping[str, object], files: MemoryFiles) -> None:
    try:
        with files.open(STATE_FILE) as file, _without_crc32():
            torch.save(state, file)
    except RuntimeError as error:
        # torch replaces the error of a file by one about the position in it.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from error
        raise


def _save_shards(state: Mapping[str, object], files: MemoryFiles) -> None:
    from drawbar.torch._memory_file_system import save_shards  # its imports take time

    with _without_crc32():
        save_shards(dict(state), files)


@contextmanager
def _without_crc32() -> Iterator[None]:
    """Make `torch.save` not compute CRC32, which takes longer than the copy.

    `torch.load` does not need it, and Drawbar writes its own checksums after the commit.
    """
    if not hasattr(torch.serialization, "set_crc32_options"):  # torch < 2.6
        yield
        return
    previous = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        yield
    finally:
        torch.serialization.set_crc32_options(previous)


def load_state(
    like: dict[str, Any] | Callable[[], dict[str, Any]] | None = None,
) -> dict[str, Any] | None:
    """Load the state of the latest checkpoint that `save_async` has saved.

    Call it on all ranks. Tensors without sharding are loaded to the CPU. The files are unpickled,
    which can execute arbitrary code, so load only checkpoints that you trust.

    Args:
        like: State of the same structure, such as the one of a new model, or a function that
            returns it. Required if the state contains DTensors: they are loaded into the tensors
            of `like`, with their data types and any number of workers. Otherwise it is not used.
            A function is called only if it is used. Pass a function if it calls `get_state_dict`,
            which counts as an optimizer step before the first step.

    Returns:
        The state; None if the run has no checkpoint yet.

    Raises:
        FileNotFoundError: The checkpoint was not saved by `save_async`.
        ValueError: The state contains DTensors, and `like` is missing.

    Example:
        ```python
        def get_state():
            model_state, optimizer_state = get_state_dict(model, optimizer)
            return {"model": model_state, "optimizer": optimizer_state, "epoch": 0}

        state = load_state(get_state)
        if state is not None:
            set_state_dict(
                model,
                optimizer,
                model_state_dict=state["model"],
                optim_state_dict=state["optimizer"],
            )
            start_epoch = state["epoch"] + 1
        ```
    """
    checkpoint = get_agreed_checkpoint()
    if checkpoint is None:
        return None
    with checkpoint.as_directory() as directory:
        path = Path(directory, STATE_FILE)
        if path.exists():
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=False)
            return state
        if not Path(directory, _DCP_METADATA_FILE).exists():
            raise FileNotFoundError(
                f"{checkpoint} has no file {STATE_FILE!r}. Save it with drawbar.torch.save_async()."
            )
        if like is None:
            raise ValueError(
                f"{checkpoint} contains DTensors. Pass a state with the same structure to load "
                "them into: load_state(like)."
            )
        from torch.distributed.checkpoint.state_dict_loader import load  # takes time

        template = like() if callable(like) else like
        load(template, checkpoint_id=directory)
    return template
