"""Tests of the validation of a Trainer's checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from drawbar.train import Checkpoint, ValidationConfig


def count_parameters(checkpoint: Checkpoint) -> dict[str, int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint.path)
    return {"parameters": model.num_parameters()}


def test_report_callback_validates_checkpoints(tiny: Any, runs: Any, tmp_path: Path) -> None:
    def function() -> int:
        from drawbar.transformers import RayTrainReportCallback, prepare_trainer

        options = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
        trainer = tiny.trainer(tmp_path / "output", **options)
        trainer.add_callback(RayTrainReportCallback(validation=True))
        prepare_trainer(trainer).train()
        return int(trainer.model.num_parameters())

    config = ValidationConfig(count_parameters)
    result = runs.fit(function, tmp_path, num_workers=0, validation_config=config)
    found = [metrics["parameters"] for _, metrics in result.best_checkpoints]
    assert found == [result.return_value] * 2
