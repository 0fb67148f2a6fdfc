"""The Trainer in the training function."""

from __future__ import annotations

import os
import warnings
from typing import Any, TypeVar

from drawbar.train.backend import make_import_error, require_package, start_training

try:
    import torch
    from accelerate.data_loader import DataLoaderDispatcher
    from transformers import Trainer
    from transformers.trainer import TRAINER_STATE_NAME
except ImportError as error:
    raise make_import_error("transformers", extra="transformers") from error

from drawbar.accelerate.integration import allow_sharding_on_cpu, require_matching_ranks
from drawbar.torch.deepspeed import disable_deepspeed_shm
from drawbar.train import Checkpoint, get_all_reported_checkpoints, get_context
from drawbar.transformers._data import (
    EpochFromStepsCallback,
    ShardIterableDataset,
    is_batch_iterable,
    is_shard,
)
from drawbar.transformers._report_callback import RayTrainReportCallback
from drawbar.transformers._resume import (
    SkipCompleteTraining,
    is_complete,
    load_state_of_this_run,
    restore_callbacks,
    was_stopped,
)

require_package("transformers", extra="transformers", min_version="4.50")

T = TypeVar("T", bound=Trainer)


def prepare_trainer(trainer: T) -> T:
    """Make a Trainer part of the run. All ranks must call it, before `train()`.

    - `train()` goes on from the run's newest checkpoint after a restart, or when a run is
      continued: with its optimizer, scheduler, random generators and place in the data. What you
      pass as `resume_from_checkpoint` wins: a path, or False to begin anew; True means the same as
      nothing where the run has a checkpoint. Only a checkpoint of an earlier attempt counts, so a
      second Trainer in the same function begins anew.
    - `train_dataset` and `eval_dataset` may be what `drawbar.train.get_dataset_shard` gives, whose
      rows go through the Trainer's `data_collator`, or batches, by its `iter_torch_batches`. An
      epoch is this worker's part, so leave `max_steps` out if the dataset given to the trainer is
      materialized; otherwise its length is not known, and `max_steps` is needed. A dataset that is
      not split is evaluated by all workers together.
    - `load_best_model_at_end` loads from the run's checkpoints.
    - `fsdp` and `deepspeed` work on CPUs too, where Accelerate by itself leaves both out without a
      word (FSDP: version 2).

    Args:
        trainer: A `transformers.Trainer`, also of a subclass such as TRL's `SFTTrainer`.

    Returns:
        The same object. Its class is now a subclass of what it was.

    Raises:
        TypeError: It is not a `transformers.Trainer`.
        RuntimeError: Called outside a training function, or with `TrainingArguments` that were made
            outside of it.
    """
    get_context()  # raises outside a training function
    if isinstance(trainer, PreparedTransformersTrainer):
        return trainer
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"prepare_trainer takes a transformers.Trainer, found {trainer!r} "
            f"({type(trainer).__name__})"
        )
    args = trainer.args
    if (args.fsdp or args.deepspeed) and not _uses_sharding(trainer):
        if args.deepspeed:
            disable_deepspeed_shm()
        with allow_sharding_on_cpu():
            trainer.create_accelerator_and_postprocess()
    require_matching_ranks(args.world_size, args.process_index, "Trainer")
    if args.save_total_limit is not None:
        warnings.warn(
            f"save_total_limit={args.save_total_limit} deletes nothing here, since the checkpoints "
            "are the run's; write RunConfig(checkpoint_config=CheckpointConfig(num_to_keep="
            f"{args.save_total_limit})) instead",
            stacklevel=2,
        )
    # The class and not the object: callbacks and the user hold on to that.
    trainer_class = type(trainer)
    trainer.__class__ = type(
        trainer_class.__name__,
        (PreparedTransformersTrainer, trainer_class),
        {"__module__": __name__},
    )
    return trainer


def _uses_sharding(trainer: Trainer) -> bool:
    return trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled


class PreparedTransformersTrainer(Trainer):
    """Changed methods of a prepared Trainer."""

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, from the run's newest checkpoint if no other is given.

        A run whose training is complete, or was stopped by a callback, trains no further.
        """
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, RayTrainReportCallback):
                callback.is_trainer_prepared = True
        self.remove_callback(SkipCompleteTraining)  # of an earlier call
        self.add_callback(SkipCompleteTraining)
        if is_shard(self.train_dataset) or is_batch_iterable(self.train_dataset):
            self.args.ignore_data_skip = True  # a shard begins with what is left of the epoch
            self.add_callback(EpochFromStepsCallback)
        resume_checkpoint = start_training()
        if resume_from_checkpoint not in (None, True) or resume_checkpoint is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        checkpoint, max_steps = _require_trainer_checkpoint(resume_checkpoint), self.args.max_steps
        with checkpoint.as_directory() as path:
            state = load_state_of_this_run(checkpoint, path)
            if state is not None:
                restore_callbacks(self.callback_handler.callbacks, state)
                if was_stopped(state):
                    self.args.max_steps = state.global_step
            try:
                return super().train(path, *args, **kwargs)
            finally:
                self.args.max_steps = max_steps

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of a step; none if training is complete."""
        if is_complete(self.state):
            return [], None
        return super().get_batch_samples(*args, **kwargs)

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[object]:
        """Give the loader of the training data."""
        data = self.train_dataset
        if is_shard(data) or is_batch_iterable(data):
            return self._make_local_loader(data, self.args.train_batch_size)
        return super().get_train_dataloader()

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Give the loader of some evaluation data."""
        data: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.eval_dataset[data]  # type: ignore[index]  # a str names one of a dict's
        if is_shard(data) and data.world_size == 1:  # the same on all workers: split by Accelerate
            return super().get_eval_dataloader(ShardIterableDataset(data))
        if is_shard(data) or is_batch_iterable(data):
            return self._make_local_loader(data, self.args.eval_batch_size)
        return super().get_eval_dataloader(eval_dataset)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch.

        Accelerate splits the last rows of a shard evenly, say 6 in 3 and 3, but the Trainer weighs
        the workers' losses as if the first had a full batch. So all give the mean of these rows.
        """
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        split = isinstance(self.callback_handler.eval_dataloader, DataLoaderDispatcher)
        if split and loss is not None and self.accelerator.gradient_state.end_of_dataloader:
            loss = self.accelerator.reduce(loss, "mean")
        return loss, logits, labels

    def _make_local_loader(
        self, data: object, batch_size: int
    ) -> torch.utils.data.DataLoader[object]:
        """Give a loader of data that is this worker's alone.

        Accelerate would split it again, and read a batch ahead of what the checkpoint counts.
        """
        dataset = ShardIterableDataset(data)
        if not is_shard(data):
            return torch.utils.data.DataLoader(dataset, batch_size=None)
        return torch.utils.data.DataLoader(
            dataset,
            batch_size=batch_size,
            collate_fn=self._get_collator_with_removed_columns(self.data_collator),
            drop_last=self.args.dataloader_drop_last,
        )

    def _load_best_model(self) -> None:
        if os.path.isdir(str(self.state.best_model_checkpoint)):
            return super()._load_best_model()
        step = self.state.best_global_step
        found = [
            each for each in get_all_reported_checkpoints() if each.metrics.get("step") == step
        ]
        if not found:
            raise RuntimeError(
                f"load_best_model_at_end: the checkpoint of step {step}, the best by "
                f"{self.args.metric_for_best_model}, is not in the run any more. Have "
                "CheckpointConfig rank the checkpoints likewise: checkpoint_score_attribute="
                f"'eval_{str(self.args.metric_for_best_model).removeprefix('eval_')}', "
                f"checkpoint_score_order={'max' if self.args.greater_is_better else 'min'!r}"
            )
        with found[-1].checkpoint.as_directory() as path:
            self.state.best_model_checkpoint = path
            super()._load_best_model()


def _require_trainer_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint from which a Trainer can resume.

    Raises:
        RuntimeError: No Trainer made the checkpoint.
    """
    manifest = checkpoint.manifest
    if manifest and all(file.path != TRAINER_STATE_NAME for file in manifest.files):
        raise RuntimeError(
            f"{checkpoint} has no {TRAINER_STATE_NAME}, so a Trainer cannot resume from it. Use "
            "RayTrainReportCallback for all checkpoints of the run, or set where to resume: "
            "trainer.train(resume_from_checkpoint=...), False to start from scratch"
        )
    return checkpoint
