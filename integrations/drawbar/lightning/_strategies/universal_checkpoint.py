"""Load DeepSpeed checkpoints with a different number of workers.

Each worker saves its shards, and DeepSpeed loads each shard on the worker of the same rank. For a
different number of workers, DeepSpeed can convert them to a "universal checkpoint" with the full
weights and optimizer state (https://www.deepspeed.ai/tutorials/universal-checkpointing/).
"""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from drawbar.lightning._compat import load_universal_checkpoints
from drawbar.train import collective, get_context

DEEPSPEED_TAG = "checkpoint"  # the tag that Lightning passes to DeepSpeed


@contextmanager
def open_for_world_size(path: Path, engine: Any) -> Iterator[Path]:
    """Yield a sharded checkpoint that the engine can load with the current number of workers.

    Call it on all ranks. One rank of each node converts the checkpoint into a temporary directory
    of the same size, which is deleted after loading. If the number of workers has not changed, or
    if there are no shards, the original path is yielded.
    """
    shards = len(list((path / DEEPSPEED_TAG).glob("*_optim_states.pt")))
    if shards in (0, get_context().get_world_size()):
        yield path
        return
    with _universal_checkpoint(path) as directory, load_universal_checkpoints(engine):
        yield directory


@contextmanager
def _universal_checkpoint(path: Path) -> Iterator[Path]:
    context = get_context()
    with tempfile.TemporaryDirectory(prefix="drawbar-universal-") as directory:
        if context.get_local_rank() == 0:
            _convert(path / DEEPSPEED_TAG, Path(directory, DEEPSPEED_TAG))
        first_rank_of_node = context.get_world_rank() - context.get_local_rank()
        yield Path(collective.all_gather(directory)[first_rank_of_node])
        collective.barrier()  # all ranks have loaded; the directory can be deleted


def _convert(source: Path, target: Path) -> None:
    from deepspeed.checkpoint import ds_to_universal

    # These are the defaults of its command line.

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
