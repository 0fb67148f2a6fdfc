"""Random scenarios of Transformers: samplers, streams, accumulation, and ways to save."""

from __future__ import annotations

import random
from typing import Any

import torch
from transformers import (
    PretrainedConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)

from benchmarks._soak_restarts import Steps
from benchmarks._soak_streams import make_dataset, make_sampler, read_rows
from drawbar.transformers import prepare_trainer

KINDS = (
    "default",
    "group_by_length",
    "not_seedable",
    "weighted",
    "weighted_with_generator",
    "epoch_sampler",
    "unsized_sampler",
    "stream",
    "epoch_stream",
    "random_stream",
    "sized_random_stream",
    "huggingface",
    "huggingface_shuffled",
)
UNSIZED = ("unsized_sampler", "stream", "epoch_stream", "random_stream", "huggingface")


def draw(rng: random.Random) -> dict[str, Any]:
    """Return the settings of a random scenario."""
    kind = rng.choice(KINDS)
    batch_size, accumulation_steps = rng.randint(1, 4), rng.choice((1, 1, 2, 3))
    # Without a step per epoch, Transformers never ends if the length is unknown.
    rows = rng.randint(batch_size * accumulation_steps, 24)
    is_limited = kind.startswith(UNSIZED) or rng.random() < 0.3
    # At the end of an epoch, gradients of the last batches may be left, which nothing stores.
    has_rest = is_limited and accumulation_steps > 1
    save_strategy = "steps" if has_rest else rng.choice(("steps", "epoch"))
    return {
        "kind": kind,
        "rows": rows,
        "dropout": rng.choice((0.0, 0.3)),
        "arguments": {
            "per_device_train_batch_size": batch_size,
            "gradient_accumulation_steps": accumulation_steps,
            "max_steps": rng.randint(4, 20) if is_limited else -1,
            "num_train_epochs": rng.randint(1, 3),
            "save_strategy": save_strategy,
            "save_steps": rng.randint(1, 7),
            "dataloader_drop_last": rng.random() < 0.3,
            "dataloader_num_workers": rng.choices((0, 1), weights=(19, 1))[0],
        },
    }


class Config(PretrainedConfig):  # type: ignore[no-untyped-call]  # of Transformers
    """Configuration of `Model`."""

    model_type = "soak"


class Model(PreTrainedModel):  # type: ignore[no-untyped-call]  # of Transformers
    """A layer with dropout that records the rows of its batches."""

    config_class = Config

    def __init__(self, config: Config, dropout: float) -> None:
        super().__init__(config)
        self.layer = torch.nn.Linear(1, 1)
        self.dropout = torch.nn.Dropout(dropout)
        self.rows: list[list[int]] = []
        self.post_init()  # type: ignore[no-untyped-call]

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        self.rows.append(read_rows({"x": x}))
        return {"loss": self.dropout(self.layer(x / 8)).pow(2).mean()}


class AddSteps(TrainerCallback):
    """Adds the steps of a Trainer, and fails where it is planned.

    Args:
        steps: Steps of the attempt.
        model: The model.
    """

    def __init__(self, steps: Steps, model: Model) -> None:
        self._steps = steps
        self._model = model

    def on_step_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Fail before a step."""
        self._steps.stop_if_planned()

    def on_step_end(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Add a step."""
        self._steps.add(state.global_step, list(self._model.rows))
        self._model.rows.clear()

    def on_save(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        **kwargs: Any,
    ) -> None:
        """Count the steps as saved."""
        self._steps.save()


def collate(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return a batch."""
    return {"x": torch.stack([row["x"] for row in rows])}


def train(settings: dict[str, Any], steps: Steps) -> object:
    """Train, and return the weights and the epoch of each logged step."""
    kind, rows = settings["kind"], settings["rows"]
    options = dict(settings["arguments"])
    if kind == "not_seedable":
        options["accelerator_config"] = {"use_seedable_sampler": False}
    data = make_dataset(kind, rows)
    if kind == "group_by_length":
        options["train_sampling_strategy"] = kind
        data = [{**data[index], "input_ids": [0] * (1 + index % 5)} for index in range(rows)]
    torch.manual_seed(0)
    model = Model(Config(), settings["dropout"])
    args = TrainingArguments(
        f"{settings['folder']}/output",
        remove_unused_columns=False,
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        logging_steps=1,
        **options,
    )
    trainer = Trainer(model, args, train_dataset=data, data_collator=collate)
    if sampler := make_sampler(kind, rows):
        untyped: Any = trainer
        untyped._get_train_sampler = lambda *_: sampler
    trainer = prepare_trainer(trainer)
    trainer.add_callback(AddSteps(steps, model))
    trainer.train()
    logs = [(log["step"], log["epoch"], log["loss"]) for log in _losses(trainer)]
    return logs, model.layer.weight.item()


def _losses(trainer: Trainer) -> list[dict[str, Any]]:
    return [log for log in trainer.state.log_history if "loss" in log]
