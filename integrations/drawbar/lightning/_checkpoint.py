"""Save and load Lightning checkpoints as committed checkpoints of the run.

`Trainer.save_checkpoint`, `ModelCheckpoint`, and sharded strategies all call the strategy's
`save_checkpoint` on all ranks. A `CheckpointIO` plugin is not enough: DDP calls it only on rank 0,
and the FSDP, DeepSpeed, and DTensor strategies do not call it. The strategies of
`drawbar.lightning` therefore inherit from `CheckpointStrategyMixin`. Lightning's output, a file or
a directory of shards, is written directly to `checkpoint.ckpt` in the committed checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drawbar import train
from drawbar.lightning._bases import ParallelStrategy
from drawbar.lightning._compat import has_weights_only_argument, is_creating_train_loaders
from drawbar.lightning._data_position import ShardBatches, TrainLoaderTracker
from drawbar.lightning._environment import is_in_training_function
from drawbar.lightning._epoch_start import resume_within_epoch
from drawbar.lightning._prefetching import make_loader_without_prefetched_batch
from drawbar.train import Checkpoint, CheckpointConsistencyMode, collective, get_context
from drawbar.train.backend import discard_checkpoint, sync_report_index

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

CHECKPOINT_NAME = "checkpoint.ckpt"

SAVE_TIMEOUT_S = 300.0
"""Time in seconds that a rank waits for the other ranks before it saves."""

SAVE_TIMEOUT_AFTER_ERROR_S = 10.0
"""Shorter time if an exception makes a rank save. Other ranks may not have the exception."""


class CheckpointStrategyMixin(ParallelStrategy):
    """Mixin for strategies: save and load checkpoints with the positions of data loaders."""

    previous_checkpoint: Checkpoint | None = None
    """Newest checkpoint of the last `fit`, if the Trainer was created in the driver."""

    weights_only: bool | None = None
    """`weights_only` argument of the current call. Lightning does not pass it to each strategy."""

    @cached_property
    def _train_loaders(self) -> TrainLoaderTracker:
        return TrainLoaderTracker()

    def setup_environment(self) -> None:
        """Reset the numbering of loaders when `fit`, `validate`, `test`, or `predict` starts."""
        self._train_loaders.reset_numbering()
        super().setup_environment()

    def save_checkpoint(
        self, checkpoint: dict[str, object], filepath: str | Path, storage_options: object = None
    ) -> None:
        """Save to a path. If it is in the run directory, report it as a checkpoint of the run."""
        if not is_in_training_function():  # the driver, after the workers have ended
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        name = run_checkpoint_name(filepath)
        error = sys.exception()  # not None if a callback saves because training failed
        if name is None or error is not None:
            _wait_for_all_ranks(filepath, error)
        if name is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if "optimizer_states" not in checkpoint:
            raise ValueError(
                f"{str(filepath)!r} would be a checkpoint of the run without optimizer state, from "
                "which a restart cannot resume. Use weights_only=False, or a path outside the run."
            )
        with shared_checkpoint_dir() as path:
            super().save_checkpoint(checkpoint, path / CHECKPOINT_NAME, storage_options)
            report_shared_checkpoint(
                logged_metrics(_get_trainer(self)), path, checkpoint_dir_name=name
            )

    def load_checkpoint(
        self, checkpoint_path: str | Path, *args: Any, **kwargs: Any
    ) -> dict[str, object]:
        """Load from the given path, and download the checkpoint first if it is remote.

        Checkpoints of this run are unpickled in full, as Lightning wrote them. torch's default,
        `weights_only=True`, rejects ordinary hyperparameters such as a `Path`.
        """
        checkpoint_path = Path(checkpoint_path)
        committed = _find_committed(checkpoint_path, self.previous_checkpoint)
        if has_weights_only_argument(super().load_checkpoint):
            weights_only = self.weights_only
            if weights_only is None and self._is_trusted(checkpoint_path, committed):
                weights_only = False
            args, kwargs = (), {"weights_only": weights_only}
        with (
            open_local(checkpoint_path, committed) as path,
            self.convert_for_loading(path) as loadable_path,
        ):
            # Other functions, such as validate(), always read all of their data.
            if _get_trainer(self).state.fn == "fit":
                self._train_loaders.resume_from(Checkpoint(path.parent))
            loaded: dict[str, object] = super().load_checkpoint(loadable_path, *args, **kwargs)
        return loaded

    def _is_trusted(self, path: Path, committed: Checkpoint | None) -> bool:
        """Return whether this run, or the last `fit` of the driver's Trainer, committed it."""
        previous = self.previous_checkpoint
        if previous is not None and (
            committed == previous or path.parent.parent == Path(previous.path).parent
        ):
            return True
        manifest = None if committed is None else committed.manifest
        return manifest is not None and manifest.run_id == get_context().get_run_id()

    def convert_for_loading(self, path: Path) -> AbstractContextManager[Path]:
        """Convert a checkpoint for the current number of workers, if its format needs it."""
        return nullcontext(path)

    def remove_checkpoint(self, filepath: str | Path) -> None:
        """Delete a checkpoint for `ModelCheckpoint`. The latest one of the run is always kept."""
        name = run_checkpoint_name(filepath)
        if name is None:
            super().remove_checkpoint(filepath)
        elif self.is_global_zero:
            discard_checkpoint(name)

    def process_dataloader(self, dataloader: object) -> object:
        """Wrap a training data loader so that checkpoints contain its position."""
        dataloader = super().process_dataloader(dataloader)
        trainer = _get_trainer(self)
        if ShardBatches.is_shard_loader(dataloader):
            loader: object = ShardBatches(dataloader)
        elif trainer.training:
            loader = self._train_loaders.make_resumable(dataloader, trainer)
            if loader is not dataloader:
                return loader
        else:
            return dataloader
        if not is_in_training_function() or not is_creating_train_loaders(trainer):
            return loader
        return make_loader_without_prefetched_batch(loader, trainer)

    def on_train_start(self) -> None:
        """Adapt Lightning to an epoch that resumes in its middle."""
        super().on_train_start()
        trainer = _get_trainer(self)
        resume_within_epoch(trainer)
        self._train_loaders.align_batch_count(trainer)
        self._train_loaders.reset_numbering()


def _get_trainer(strategy: ParallelStrategy) -> Trainer:
    assert strategy.lightning_module is not None  # set while the Trainer runs
    return strategy.lightning_module.trainer


# -- saving


def _wait_for_all_ranks(filepath: str | Path, error: BaseException | None) -> None:
    """Wait until all ranks have called `save_checkpoint`.

    Lightning's own barrier, after the checkpoint is saved, has no timeout.

    Args:
        filepath: Path at which the checkpoint will be saved.
        error: Exception that made this rank save. None if training continues.

    Raises:
        RuntimeError: Some ranks did not call `save_checkpoint` in time.
        BaseException: `error`. It is raised again, with a note, if some ranks did not call in time.
    """
    seconds = SAVE_TIMEOUT_S if error is None else SAVE_TIMEOUT_AFTER_ERROR_S
    try:
        collective.barrier(timeout_s=seconds)
        return
    except TimeoutError:
        pass
    # Raise outside the handler, so that TimeoutError does not become the context of `error`.
    if error is not None:
        error.add_note(
            f"{str(filepath)!r} was not saved after this error, because not all ranks called "
            f"save_checkpoint() within {seconds:g} s."
        )
        raise error
    raise RuntimeError(
        f"trainer.save_checkpoint({str(filepath)!r}) was called on rank "
        f"{get_context().get_world_rank()}, but not on all ranks within {seconds:g} s. "
        "Call it on every rank, without `if trainer.is_global_zero`. The strategy selects the "
        "ranks that write."
    )


@contextmanager
def shared_checkpoint_dir() -> Iterator[Path]:
    """Create a new checkpoint directory on rank 0 and yield it on all ranks."""
    if get_context().get_world_rank() == 0:
        with train.checkpoint_dir() as path:
            yield collective.broadcast_from_rank_zero(path)
    else:
        yield collective.broadcast_from_rank_zero(Path())


def report_shared_checkpoint(metrics: Mapping[str, object], path: Path, **options: Any) -> None:
    """Report a checkpoint directory that all ranks have written to. Call it on all ranks.

    The first rank of each node passes the directory to `train.report()`. On a shared filesystem,
    all nodes report the same files, and each file is stored once. On node-local storage, each node
    reports the files that its own ranks wrote.
    """
    sync_report_index()  # also a barrier: all ranks have written their files
    if get_context().get_local_rank() == 0 and path.is_dir():
        train.report(metrics, checkpoint=path, **options)
    else:
        train.report(metrics)


def logged_metrics(trainer: Trainer) -> dict[str, object]:
    """Return the logged metrics with the current epoch and step."""
    progress = {"epoch": trainer.current_epoch, "step": trainer.global_step}
    return {**trainer.callback_metrics, **progress}


# -- paths


def run_checkpoint_name(filepath: str | Path) -> str | None:
    """Return the name of the checkpoint to which a path in the run directory belongs, else None."""
    path = Path(filepath)
    is_in_run = path.name == CHECKPOINT_NAME and path.parent.parent == get_context().get_storage()
    return path.parent.name if is_in_run else None


def lightning_checkpoint_path(checkpoint: Checkpoint) -> Path:
    """Return the path of the Lightning checkpoint inside a checkpoint of the run.

    For a remote checkpoint, this is a path in the run's local work directory. No file exists there;
    `open_local` downloads the checkpoint instead.
    """
    directory = Path(checkpoint.path)
    if not checkpoint.is_local:
        directory = get_context().get_storage() / directory.name
    return directory / CHECKPOINT_NAME


def is_lightning_checkpoint(checkpoint: Checkpoint) -> bool:
    """Return whether a checkpoint of the run contains a checkpoint that Lightning wrote."""
    manifest = checkpoint.manifest
    if manifest is not None:
        return any(Path(file.path).parts[0] == CHECKPOINT_NAME for file in manifest.files)
    # Checkpoints passed as `resume_from_checkpoint` may have no manifest.
    with checkpoint.as_directory() as directory:
        return Path(directory, CHECKPOINT_NAME).exists()


def find_newest_checkpoint() -> Checkpoint | None:
    """Return the newest checkpoint of the run that Lightning wrote. Call it on all ranks."""
    newest = train.get_checkpoint()
    candidates = [] if newest is None else [newest]
    candidates += [reported.checkpoint for reported in _get_committed()]
    return next(filter(is_lightning_checkpoint, reversed(candidates)), None)


@contextmanager
def open_local(path: Path, checkpoint: Checkpoint | None) -> Iterator[Path]:
    """Yield a path from which a checkpoint can be read, and download it if it is remote.

    Args:
        path: Path of the Lightning checkpoint, or of its download.
        checkpoint: Checkpoint of a run to which the path belongs, if any.
    """
    if checkpoint is None or path.exists():
        yield path
    else:
        with checkpoint.as_directory() as directory:
            yield Path(directory, CHECKPOINT_NAME)


def _find_committed(path: Path, previous: Checkpoint | None) -> Checkpoint | None:
    for checkpoint in (train.get_checkpoint(), previous):
        if checkpoint is not None and lightning_checkpoint_path(checkpoint) == path:
            return checkpoint
    for reported in _get_committed():
        if lightning_checkpoint_path(reported.checkpoint) == path:
            return reported.checkpoint
    return None


def _get_committed() -> list[train.ReportedCheckpoint]:
    return train.get_all_reported_checkpoints(CheckpointConsistencyMode.COMMITTED)
