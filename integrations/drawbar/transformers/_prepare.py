"""prepare_trainer: connect a Trainer to the run's checkpoints and data."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from drawbar.train.backend import (
    get_recovery,
    make_import_error,
    require_package,
    start_training,
)

try:
    import torch
    from accelerate.data_loader import DataLoaderDispatcher
    from transformers import Trainer, TrainingArguments
    from transformers.trainer import TRAINER_STATE_NAME
    from transformers.trainer_utils import has_length
except ImportError as error:
    raise make_import_error("transformers", extra="transformers") from error

from drawbar.accelerate.integration import allow_sharding_on_cpu, require_matching_ranks
from drawbar.torch.integration import disable_deepspeed_shm
from drawbar.train import Checkpoint, get_all_reported_checkpoints, get_context
from drawbar.transformers._compat import BestModelTrainer, get_train_batch_size, make_collator
from drawbar.transformers._data import (
    EpochFromStepsCallback,
    ShardIterableDataset,
    is_batch_iterable,
    is_shard,
)
from drawbar.transformers._global_batch import (
    drop_incomplete_global_batch,
    is_in_global_batches,
    raise_without_length,
    set_global_batch_size,
)
from drawbar.transformers._report_callback import RayTrainReportCallback
from drawbar.transformers._resume import (
    SkipCompleteTraining,
    WarnOfOtherTotalSteps,
    is_complete,
    load_state_of_this_run,
    restore_callbacks,
    was_stopped,
)
from drawbar.transformers._sampler_order import SamplerOrderCallback
from drawbar.transformers._stream import StreamCallback, StreamLoader

require_package("transformers", extra="transformers", min_version="4.50")

T = TypeVar("T", bound=Trainer)


def prepare_trainer(trainer: T, *, global_batch_size: int | None = None) -> T:
    """Connect a Trainer to the run. Call it on all ranks before `train()`.

    - `train()` reports the Trainer's logs and checkpoints. If the Trainer has no
      `RayTrainReportCallback`, this function adds one; one that you add later replaces it.
    - `train()` resumes from the run's latest checkpoint after a restart, or when the run is
      resumed: with optimizer, scheduler, random generators, and position in the data.
      `resume_from_checkpoint` takes precedence: a path, or False to start from scratch. True only
      makes a difference if the run has no checkpoint: Transformers then resumes from `output_dir`,
      or raises an error if it has none. A second Trainer in the same function does not resume from
      checkpoints of the first one.
    - `train_dataset` and `eval_dataset` may be a shard from `drawbar.train.get_dataset_shard()`,
      whose rows are passed to the Trainer's `data_collator`, or batches from its
      `iter_torch_batches()`. In each epoch, a worker reads its shard once. If the dataset passed to
      `TorchTrainer` is materialized, `max_steps` is not needed. Otherwise its length is unknown:
      set `max_steps`. A dataset that is not split is evaluated by all workers together.
    - `load_best_model_at_end` loads from the run's checkpoints.
    - `fsdp` (version 2) and `deepspeed` also work on CPUs, where Accelerate would ignore both
      without a message.

    Args:
        trainer: A `transformers.Trainer`, or a subclass such as TRL's `SFTTrainer`.
        global_batch_size: Number of samples per optimizer step, of all workers together. Sets
            `gradient_accumulation_steps`, so that each step uses the same samples with any number
            of workers, also after a restart with another number. Default: the Trainer's own
            settings apply.

    Returns:
        The same object. Its class is replaced by a subclass.

    Raises:
        TypeError: `trainer` is not a `transformers.Trainer`.
        RuntimeError: Called outside a training function, or with `TrainingArguments` that were
            created outside of it.
        ValueError: `save_only_model` is set; or the run recovers in place; or `global_batch_size`
            is not a multiple of `per_device_train_batch_size` times the number of workers; or the
            Trainer uses DeepSpeed.
            `train()` raises it if the number of samples is not a multiple of `global_batch_size`
            and `dataloader_drop_last` is not set.

    Example:
        ```python
        trainer = transformers.Trainer(model, args, train_dataset=dataset)
        trainer = prepare_trainer(trainer, global_batch_size=48)
        trainer.train()
        ```
    """
    get_context()  # raises outside a training function
    if isinstance(trainer, PreparedTransformersTrainer):
        if global_batch_size is not None:
            set_global_batch_size(trainer, global_batch_size)
        return trainer
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"prepare_trainer needs a transformers.Trainer, found {trainer!r} "
            f"({type(trainer).__name__})."
        )
    if get_recovery() is not None:
        raise ValueError(
            "transformers.Trainer does not work with FailureConfig(recovery='in_place'), because a "
            "new process cannot repeat its collectives. Set recovery='restart'."
        )
    args = trainer.args
    if (args.fsdp or args.deepspeed) and not _uses_sharding(trainer):
        if args.deepspeed:
            disable_deepspeed_shm()
        with allow_sharding_on_cpu():
            trainer.create_accelerator_and_postprocess()
    require_matching_ranks(args.world_size, args.process_index, "Trainer")
    _check_save_arguments(args)
    if global_batch_size is not None:
        set_global_batch_size(trainer, global_batch_size)
    # Change the class of the object: callbacks and the user keep references to the object.
    trainer_class = type(trainer)
    trainer.__class__ = type(
        trainer_class.__name__,
        (PreparedTransformersTrainer, trainer_class),
        {"__module__": __name__},
    )
    callbacks = trainer.callback_handler.callbacks
    if not any(isinstance(callback, RayTrainReportCallback) for callback in callbacks):
        trainer.add_callback(RayTrainReportCallback())
    return trainer


def _check_save_arguments(args: TrainingArguments) -> None:
    if args.save_only_model and args.save_strategy != "no":
        raise ValueError(
            "TrainingArguments(save_only_model=True) saves checkpoints without optimizer, learning "
            "rate, and random state, from which a restart cannot resume. Remove save_only_model. "
            'To save the model only, set save_strategy="no" and call trainer.save_model().'
        )
    if args.save_total_limit is not None:
        warnings.warn(
            f"save_total_limit={args.save_total_limit} has no effect, because the run manages its "
            "checkpoints. Set RunConfig(checkpoint_config=CheckpointConfig(num_to_keep="
            f"{args.save_total_limit})).",
            stacklevel=3,
        )


def _uses_sharding(trainer: Trainer) -> bool:
    return trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled


_CALLBACKS = (SkipCompleteTraining, SamplerOrderCallback, StreamCallback)


class PreparedTransformersTrainer(BestModelTrainer):
    """Methods that a prepared Trainer overrides."""

    skips_stream = False

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Train, starting from the run's latest checkpoint by default.

        Does not train if the run's training is complete, or was stopped by a callback.
        """
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, RayTrainReportCallback):
                callback.is_trainer_prepared = True
        for callback_class in (*_CALLBACKS, WarnOfOtherTotalSteps):
            self.remove_callback(callback_class)  # of an earlier call
        for callback_class in _CALLBACKS:
            self.add_callback(callback_class)
        max_steps, ignore_data_skip = self.args.max_steps, self.args.ignore_data_skip
        self.skips_stream = not ignore_data_skip
        if is_shard(self.train_dataset) or is_batch_iterable(self.train_dataset):
            self.args.ignore_data_skip = True  # a shard already skips the consumed rows
            self.add_callback(EpochFromStepsCallback)
        try:
            return self._train(resume_from_checkpoint, *args, **kwargs)
        finally:
            self.args.max_steps, self.args.ignore_data_skip = max_steps, ignore_data_skip

    def _train(self, resume_from_checkpoint: str | bool | None, *args: Any, **kwargs: Any) -> Any:
        resume_checkpoint = start_training()
        if resume_from_checkpoint not in (None, True) or resume_checkpoint is None:
            return super().train(resume_from_checkpoint, *args, **kwargs)
        checkpoint = _require_trainer_checkpoint(resume_checkpoint)
        with checkpoint.as_directory() as path:
            state = load_state_of_this_run(checkpoint, path)
            if state is not None:
                restore_callbacks(self.callback_handler.callbacks, state)
                self.add_callback(WarnOfOtherTotalSteps(state))
                if was_stopped(state):
                    self.args.max_steps = state.global_step
            return super().train(path, *args, **kwargs)

    def add_callback(self, callback: Any) -> None:
        """Add a callback. A `RayTrainReportCallback` replaces the one that the Trainer has."""
        if callback is RayTrainReportCallback or isinstance(callback, RayTrainReportCallback):
            self.remove_callback(RayTrainReportCallback)
        super().add_callback(callback)

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Return the batches of a step; none if training is complete."""
        if is_complete(self.state):
            return [], None
        return super().get_batch_samples(*args, **kwargs)

    def get_train_dataloader(self) -> torch.utils.data.DataLoader[object]:
        """Return the data loader of the training data."""
        data = self.train_dataset
        if is_shard(data) or is_batch_iterable(data):
            if is_in_global_batches(self):
                raise_without_length(data)
            return self._make_local_loader(data, get_train_batch_size(self))
        loader = super().get_train_dataloader()
        if is_in_global_batches(self):
            drop_incomplete_global_batch(self, loader)
        if has_length(loader) or not self.is_in_train or not self.skips_stream:
            return loader
        self.args.ignore_data_skip = True  # the loader skips the trained batches
        stream: Any = StreamLoader(loader, self.args.gradient_accumulation_steps)
        return stream  # type: ignore[no-any-return]

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the data loader of evaluation data."""
        data: Any = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, str):
            data = self.eval_dataset[data]  # type: ignore[index]  # a key of a dict of datasets
        if is_shard(data) and data.num_shards == 1:  # the same on all workers: split by Accelerate
            return super().get_eval_dataloader(ShardIterableDataset(data))
        if is_shard(data) or is_batch_iterable(data):
            return self._make_local_loader(data, self.args.eval_batch_size)
        return super().get_eval_dataloader(eval_dataset)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch.

        Accelerate splits the last rows of a dataset evenly, for example 6 rows into 3 and 3. But
        the Trainer weights the losses as if the first worker had a full batch. So all workers
        return the mean loss of these rows.
        """
        loss, logits, labels = super().prediction_step(*args, **kwargs)
        is_split = isinstance(self.callback_handler.eval_dataloader, DataLoaderDispatcher)
        if is_split and loss is not None and self.accelerator.gradient_state.end_of_dataloader:
            loss = self.accelerator.reduce(loss, "mean")
        return loss, logits, labels

    def _make_local_loader(
        self, data: object, batch_size: int
    ) -> torch.utils.data.DataLoader[object]:
        """Return a data loader for the shard of this worker.

        The loader is not prepared by Accelerate, which would split the shard again and prefetch one
        batch, so that the position in checkpoints would be one batch too far.
        """
        dataset = ShardIterableDataset(data)
        if not is_shard(data):
            return torch.utils.data.DataLoader(dataset, batch_size=None)
        return torch.utils.data.DataLoader(
            dataset,
            batch_size=batch_size,
            collate_fn=make_collator(self),
            drop_last=self.args.dataloader_drop_last,
        )

    def load_best_model(self, load: Callable[[], None]) -> None:
        """Load the best model, which may be in a checkpoint of the run.

        Raises:
            RuntimeError: The checkpoint was deleted.
        """
        if os.path.isdir(str(self.state.best_model_checkpoint)):
            return load()
        step = self.state.best_global_step
        reports = [
            report
            for report in get_all_reported_checkpoints()
            if report.metrics.get("step") == step
        ]
        if not reports:
            metric = str(self.args.metric_for_best_model).removeprefix("eval_")
            order = "max" if self.args.greater_is_better else "min"
            raise RuntimeError(
                "load_best_model_at_end: CheckpointConfig(num_to_keep=...) has deleted the best "
                f"checkpoint (step {step}, by {metric}). To keep it, set CheckpointConfig("
                f"checkpoint_score_attribute='eval_{metric}', checkpoint_score_order={order!r})."
            )
        with reports[-1].checkpoint.as_directory() as path:
            self.state.best_model_checkpoint = path
            load()


def _require_trainer_checkpoint(checkpoint: Checkpoint) -> Checkpoint:
    """Return a checkpoint from which a Trainer can resume.

    Raises:
        RuntimeError: No Trainer made the checkpoint.
    """
    manifest = checkpoint.manifest
    if manifest and all(file.path != TRAINER_STATE_NAME for file in manifest.files):
        raise RuntimeError(
            f"Cannot resume from {checkpoint}: it has no {TRAINER_STATE_NAME}. Report checkpoints "
            "only through RayTrainReportCallback. Or set resume_from_checkpoint= in "
            "trainer.train() to the path of another checkpoint, or to False to start from scratch."
        )
    return checkpoint
