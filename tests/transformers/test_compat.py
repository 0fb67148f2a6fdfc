"""Private APIs of Transformers: each test fails when Transformers changes what `_compat` uses."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainingArguments

from drawbar.transformers._compat import (
    BestModelTrainer,
    get_train_batch_size,
    make_collator,
)


class Model(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": x.sum()}


def test_collator_removes_columns_that_the_model_lacks(tmp_path: Path) -> None:
    arguments = TrainingArguments(str(tmp_path), use_cpu=True, report_to="none")
    collate = make_collator(Trainer(Model(), arguments))
    batch: Any = collate([{"x": 1.0, "name": "a"}, {"x": 2.0, "name": "b"}])
    assert list(batch) == ["x"]


def test_trainer_loads_best_model_by_method() -> None:
    assert "_load_best_model" in vars(Trainer)
    loaders = [
        value for value in vars(Trainer).values() if callable(value) and not isinstance(value, type)
    ]
    assert any("self._load_best_model()" in inspect.getsource(method) for method in loaders)
    assert BestModelTrainer._load_best_model is not Trainer._load_best_model


def test_best_step_of_strategy_best_is_set(tmp_path: Path) -> None:
    arguments = TrainingArguments(
        str(tmp_path),
        use_cpu=True,
        report_to="none",
        per_device_train_batch_size=3,
        save_strategy="best",
        eval_strategy="steps",
        metric_for_best_model="loss",
    )
    trainer = BestModelTrainer(Model(), arguments, eval_dataset=[{"x": 1.0}])
    for step, loss in ((1, 2.0), (2, 1.0), (3, 1.5)):
        trainer.state.global_step = step
        trainer._determine_best_metric({"eval_loss": loss}, trial=None)
    assert trainer.state.best_global_step == 2
    assert get_train_batch_size(trainer) == 3
