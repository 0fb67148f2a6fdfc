"""Tests of LoRA with PEFT and of TRL's `SFTTrainer`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

pytestmark = pytest.mark.usefixtures("ray_cluster")

SAVES: dict[str, Any] = {"max_steps": 8, "save_strategy": "steps", "save_steps": 4}


def lora() -> Any:
    from peft import LoraConfig

    return LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["c_attn"], fan_in_fan_out=True)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing.:FutureWarning")  # PEFT asks for it
def test_lora_after_failure_has_losses_of_uninterrupted_training(
    tiny: Any, runs: Any, tmp_path: Path
) -> None:
    def adapted(name: str, **options: Any) -> Any:
        from peft import get_peft_model

        model = get_peft_model(tiny.gpt(dropout=0), lora())
        return tiny.trainer(tmp_path / name, model, **{"max_steps": 8, **options})

    def function() -> Any:
        trainer = runs.on_ray(adapted("killed", **SAVES), die_at=6)
        trainer.train()
        return tiny.losses(trainer)

    killed = runs.fit(function, tmp_path / "killed", num_workers=0)
    expected = runs.losses_of_one_process(tmp_path / "whole", lambda: adapted("whole"))
    assert killed.return_value == pytest.approx(expected, abs=1e-5)

    from peft import PeftModel
    from safetensors.torch import load_file

    adapter = load_file(f"{killed.checkpoint.path}/adapter_model.safetensors")
    model = PeftModel.from_pretrained(tiny.gpt(), killed.checkpoint.path)
    assert set(model.peft_config) == {"default"}
    assert sum(tensor.numel() for tensor in adapter.values()) < model.num_parameters() / 10


def byte_tokenizer() -> Any:
    """A tokenizer made in code, one token per byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: number for number, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, eos_token=alphabet[0], pad_token=alphabet[0]
    )


@pytest.mark.nightly
def test_sft_trainer_of_trl_trains(tiny: Any, runs: Any, tmp_path: Path) -> None:
    def function() -> Any:
        import datasets
        from trl.trainer.sft_config import SFTConfig
        from trl.trainer.sft_trainer import SFTTrainer

        texts = [bytes(window["input_ids"]).decode("ascii", "ignore") for window in tiny.windows()]
        trainer = SFTTrainer(
            tiny.gpt(),
            SFTConfig(
                output_dir=str(tmp_path / "output"),
                max_length=32,
                per_device_train_batch_size=4,
                logging_steps=1,
                report_to="none",
                use_cpu=True,
                bf16=False,
                **SAVES,
            ),
            train_dataset=datasets.Dataset.from_dict({"text": texts}),
            processing_class=byte_tokenizer(),
        )
        trainer = runs.on_ray(trainer, die_at=6)
        trainer.train()
        return isinstance(trainer, SFTTrainer), tiny.losses(trainer)

    result = runs.fit(function, tmp_path)
    for is_sft, losses in result.return_values:
        assert is_sft
        assert sorted(losses) == list(range(1, 9))
    names = {file.name for file in Path(result.checkpoint.path).iterdir()}
    assert {"tokenizer.json", "model.safetensors", "optimizer.pt", "trainer_state.json"} <= names
