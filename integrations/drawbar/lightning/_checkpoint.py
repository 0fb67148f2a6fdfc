"""Lightning's checkpoints are Drawbar's: where they lie, how they are committed and found again.

Every way of saving in Lightning goes through the strategy's `save_checkpoint`, on all ranks: that
of `Trainer.save_checkpoint`, of `ModelCheckpoint`, of sharded strategies. A `CheckpointIO` plug-in
would not do: DDP calls it on rank 0 alone; FSDP, DeepSpeed and DTensor strategies do not at all.
So the strategies of `drawbar.lightning` have `CheckpointStrategyMixin` among their bases. What
Lightning
writes, a file or a directory of shards, lies in the committed checkpoint as `checkpoint.ckpt`, and
is written there directly.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drawbar import train
from drawbar.lightning._data_position import ShardBatches, TrainLoaderTracker
from drawbar.lightning._environment import is_in_training_function
from drawbar.train import Checkpoint, CheckpointConsistencyMode, collective, get_context
from drawbar.train.backend import discard_checkpoint, sync_report_index

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies.parallel import ParallelStrategy
else:
    ParallelStrategy = object

CHECKPOINT_NAME = "checkpoint.ckpt"

SAVE_TIMEOUT_S = 300.0
"""How long a rank that saves waits for the others to save too."""

SAVE_TIMEOUT_AFTER_ERROR_S = 10.0
"""The same for one that saves because of an exception."""


class CheckpointStrategyMixin(ParallelStrategy):
    """The part of a strategy that deals with checkpoints, and with the position in the data."""

    @cached_property
    def _train_loaders(self) -> TrainLoaderTracker:
        return TrainLoaderTracker()

    def setup_environment(self) -> None:
        """Begin a `fit`, or one of its companions."""
        self._train_loaders.reset_numbering()
        super().setup_environment()

    def save_checkpoint(
        self, checkpoint: dict[str, object], filepath: str | Path, storage_options: object = None
    ) -> None:
        """Save where Lightning says. In the run's directory, that is a report with a checkpoint."""
        if not is_in_training_function():  # the driver, when the workers are gone
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        name, error = run_checkpoint_name(filepath), sys.exception()
        if name is None or error is not None:
            _wait_for_all_ranks(filepath, error)
        if name is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        with shared_checkpoint_dir() as path:
            super().save_checkpoint(checkpoint, path / CHECKPOINT_NAME, storage_options)
            report_shared_checkpoint(
                logged_metrics(_get_trainer(self)), path, checkpoint_dir_name=name
            )

    def load_checkpoint(
        self, checkpoint_path: str | Path, *args: Any, **kwargs: Any
    ) -> dict[str, object]:
        """Load from where Lightning says; what is in remote storage is fetched."""
        with (
            open_local(Path(checkpoint_path)) as path,
            self.convert_for_loading(path) as on_these_workers,
        ):
            # Validation and test go through all of their data, however far training has come.
            if _get_trainer(self).state.fn == "fit":
                self._train_loaders.go_on_from(Checkpoint(path.parent))
            loaded: dict[str, object] = super().load_checkpoint(on_these_workers, *args, **kwargs)
        return loaded

    def convert_for_loading(self, path: Path) -> AbstractContextManager[Path]:
        """Give a checkpoint as this many workers can load it. Most can be loaded by any number."""
        return nullcontext(path)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Remove what `ModelCheckpoint` does not keep; never the run's newest checkpoint."""
        name = run_checkpoint_name(filepath)
        if name is None:
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            discard_checkpoint(name)

    def process_dataloader(self, dataloader: object) -> object:
        """Have the checkpoints carry how far a training loader has come."""
        dataloader = super().process_dataloader(dataloader)
        if ShardBatches.is_shard_loader(dataloader):
            return ShardBatches(dataloader)
        trainer = _get_trainer(self)
        return (
            self._train_loaders.make_resumable(dataloader, trainer)
            if trainer.training
            else dataloader
        )


def _get_trainer(strategy: ParallelStrategy) -> Trainer:
    assert strategy.lightning_module is not None  # it is running
    return strategy.lightning_module.trainer


# -- saving


def _wait_for_all_ranks(filepath: str | Path, error: BaseException | None) -> None:
    """Wait for all ranks, since Lightning does, and without end, when it has saved.

    Args:
        filepath: Where to.
        error: Because of which exception, if of one: maybe not on every rank.

    Raises:
        RuntimeError: They do not all come.
        BaseException: The same, with `error`: that is the cause.
    """
    seconds = SAVE_TIMEOUT_S if error is None else SAVE_TIMEOUT_AFTER_ERROR_S
    try:
        collective.barrier(timeout_s=seconds)
        return
    except TimeoutError:
        pass
    # Not in there: raised while another is handled, it would lose its own cause.
    if error is not None:
        error.add_note(
            f"{str(filepath)!r} was not saved for it: not every rank came within {seconds:g} s, "
            "and Lightning has all of them take part"
        )
        raise error
    raise RuntimeError(
        f"trainer.save_checkpoint() was called for {str(filepath)!r} on rank "
        f"{get_context().get_world_rank()}, but within {seconds:g} s not on every rank; "
        "Lightning has all of them take part, so call it on every rank, and not only where "
        "trainer.is_global_zero: rank 0 alone writes the file"
    )


@contextmanager
def shared_checkpoint_dir() -> Iterator[Path]:
    """Give all ranks one new directory for their checkpoint, which rank 0 makes."""
    if get_context().get_world_rank() == 0:
        with train.checkpoint_dir() as path:
            yield collective.broadcast_from_rank_zero(path)
    else:
        yield collective.broadcast_from_rank_zero(Path())


def report_shared_checkpoint(metrics: Mapping[str, object], path: Path, **options: Any) -> None:
    """Report, on all ranks, the checkpoint that they have written into one directory.

    One rank of each node offers what lies there. On a shared filesystem that is the same again,
    which is stored once; without one it is this node's share.
    """
    sync_report_index()  # and when all ranks have come here, all files are written
    if get_context().get_local_rank() == 0 and path.is_dir():
        train.report(metrics, checkpoint=path, **options)
    else:
        train.report(metrics)


def logged_metrics(trainer: Trainer) -> dict[str, object]:
    """Give what the model has logged, and the epoch and step at which it is reported."""
    where = {"epoch": trainer.current_epoch, "step": trainer.global_step}
    return {**trainer.callback_metrics, **where}


# -- where they lie


def run_checkpoint_name(filepath: str | Path) -> str | None:
    """Give the name of the run's checkpoint that a path of Lightning's is in; None if in none."""
    path = Path(filepath)
    in_run = path.name == CHECKPOINT_NAME and path.parent.parent == get_context().get_storage()
    return path.parent.name if in_run else None


def lightning_checkpoint_path(checkpoint: Checkpoint) -> Path:
    """Give the path of Lightning's own checkpoint in one of Drawbar's.

    For remote storage it is that in the run's work folder, where nothing lies: see `local`.
    """
    folder = Path(checkpoint.path)
    if not checkpoint.is_local:
        folder = get_context().get_storage() / folder.name
    return folder / CHECKPOINT_NAME


@contextmanager
def open_local(path: Path) -> Iterator[Path]:
    """Give a path at which a checkpoint can be read: the same, unless it is in remote storage."""
    checkpoint = None if path.exists() else _find_committed(path)
    if checkpoint is None:
        yield path
    else:
        with checkpoint.as_directory() as folder:
            yield Path(folder, CHECKPOINT_NAME)


def _find_committed(path: Path) -> Checkpoint | None:
    newest = train.get_checkpoint()
    if newest is not None and lightning_checkpoint_path(newest) == path:
        return newest
    for reported in train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED):
        if lightning_checkpoint_path(reported.checkpoint) == path:
            return reported.checkpoint
    return None
