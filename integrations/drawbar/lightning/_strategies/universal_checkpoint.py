"""DeepSpeed's checkpoints on another number of workers than have made them.

Each worker saves the shards that it holds, and DeepSpeed gives each back to the worker of the same
rank. For any other number of workers it has the "universal checkpoint", with weights and optimizer
state by parameter, whole, into which it converts (https://www.deepspeed.ai/tutorials/universal-checkpointing/).
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drawbar.train import collective, get_context

DEEPSPEED_TAG = "checkpoint"  # by which Lightning has DeepSpeed name what is in a checkpoint


@contextmanager
def open_for_world_size(path: Path, engine: Any) -> Iterator[Path]:
    """Give a sharded checkpoint as one that the engine can load, with any number of workers.

    All ranks must call this. One of each node converts, into a temporary folder that is as large as
    the checkpoint and removed after loading. If the number of workers is that of the shards, or if
    there are none, the checkpoint is given as it is.
    """
    shards = len(list((path / DEEPSPEED_TAG).glob("*_optim_states.pt")))
    if shards in (0, get_context().get_world_size()):
        yield path
        return
    config = engine._config
    with _universal_checkpoint(path) as folder:
        config.load_universal_checkpoint = True
        try:
            yield folder
        finally:
            config.load_universal_checkpoint = False


@contextmanager
def _universal_checkpoint(path: Path) -> Iterator[Path]:
    context = get_context()
    with tempfile.TemporaryDirectory(prefix="drawbar-universal-") as own:
        if context.get_local_rank() == 0:
            _convert(path / DEEPSPEED_TAG, Path(own, DEEPSPEED_TAG))
        first_of_node = context.get_world_rank() - context.get_local_rank()
        yield Path(collective.all_gather(own)[first_of_node])
        collective.barrier()  # nobody reads it any more


def _convert(source: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    # What its command line sets.
    ds_to_universal.main(
        Namespace(
            input_folder=str(source),
            output_folder=str(target),
            num_extract_workers=1,
            num_merge_workers=1,
            keep_temp_folder=False,
            strict=True,
            inject_missing_state=True,
        )
    )
