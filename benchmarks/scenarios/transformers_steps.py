"""Transformers steps per second, compared with a plain Trainer."""

from __future__ import annotations

import importlib
import tempfile
from typing import Any

from benchmarks._scenario import Samples, Side
from benchmarks.scenarios._steps import TOTAL, Steps, steps_scenario

BATCH = 16
WINDOW = 64
INTEGRATIONS = {
    "drawbar": "drawbar.transformers",
    "ray.train": "ray.train.huggingface.transformers",
}


def train(side: Side) -> Samples:
    """Train a small GPT-2; on Drawbar and ray.train with their callbacks, logging now and then."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    steps = Steps()

    class Ticks(TrainerCallback):
        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            steps.tick()

    with tempfile.TemporaryDirectory() as output:
        args = TrainingArguments(
            output_dir=output,
            max_steps=TOTAL,
            per_device_train_batch_size=BATCH,
            logging_steps=10,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            use_cpu=True,
        )
        trainer = Trainer(_gpt(), args, train_dataset=_windows(), callbacks=[Ticks()])
        if side != "bare":
            integration = importlib.import_module(INTEGRATIONS[side])
            trainer.add_callback(integration.RayTrainReportCallback())
            trainer = integration.prepare_trainer(trainer)
        trainer.train()
    return steps.samples()


def _gpt() -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(vocab_size=256, n_positions=WINDOW, n_embd=64, n_layer=2, n_head=4)
    return GPT2LMHeadModel(config)


def _windows() -> list[dict[str, list[int]]]:
    pieces = [[(start + i) * 31 % 256 for i in range(WINDOW)] for start in range(2000)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


SCENARIO = steps_scenario(
    "transformers_steps", "Transformers steps of a small GPT-2, gloo, 2 workers", train
)
