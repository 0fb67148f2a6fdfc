"""A tiny GPT-2 over bytes, which every test trains, on Ray or under torchrun."""

from __future__ import annotations

import builtins
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from drawbar import train
from drawbar.torch import TorchTrainer
from drawbar.train import CheckpointConfig, FailureConfig, Result, RunConfig, ScalingConfig

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

WINDOW = 32
SHARDED = {
    "fsdp": {
        "fsdp": True,
        "fsdp_config": {
            "transformer_layer_cls_to_wrap": ["GPT2Block"],
            "state_dict_type": "SHARDED_STATE_DICT",
        },
    },
    **{
        f"zero{stage}": {
            "deepspeed": {
                "zero_optimization": {"stage": stage},
                "train_micro_batch_size_per_gpu": "auto",
                "gradient_accumulation_steps": "auto",
            }
        }
        for stage in (2, 3)
    },
}
"""Arguments of `TrainingArguments` that shard the model."""


def windows(count: int = 64) -> list[dict[str, list[int]]]:
    """The documentation of Python's built-ins, cut into pieces; a byte is a token."""
    text = "\n".join(str(each.__doc__) for each in vars(builtins).values()).encode()
    pieces = [list(text[i * WINDOW : (i + 1) * WINDOW]) for i in range(count)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def tiny_gpt(dropout: float = 0.1) -> Any:
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    options: dict[str, Any] = {
        "vocab_size": 256,
        "n_positions": WINDOW,
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 2,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "loss_type": "ForCausalLMLoss",
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout),
    }
    return GPT2LMHeadModel(GPT2Config(**options))


def tiny_trainer(output_dir: str | os.PathLike[str], model: Any = None, **options: Any) -> Any:
    """Create a plain Trainer. `options` are `TrainingArguments` and the two datasets."""
    from transformers import Trainer, TrainingArguments

    if "deepspeed" in options and options.get("use_cpu", True):
        os.environ["DS_ACCELERATOR"] = "cpu"  # what DeepSpeed would find out, with a warning
    data = {name: options.pop(name, windows()) for name in ("train_dataset", "eval_dataset")}
    defaults = {
        "output_dir": str(output_dir),
        "per_device_train_batch_size": 4,
        "learning_rate": 1e-2,
        "max_steps": 20,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return Trainer(model or tiny_gpt(), TrainingArguments(**{**defaults, **options}), **data)


def on_ray(trainer: Any, die_at: int | None = None) -> Any:
    """Prepare a Trainer, and perhaps add a way to die at a step of the first attempt."""
    from transformers import TrainerCallback

    from drawbar.transformers import prepare_trainer

    class Kill(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            context = train.get_context()
            now = context.get_attempt(), context.get_world_rank(), state.global_step
            if now == (0, context.get_world_size() - 1, die_at):
                die()

    trainer.add_callback(Kill())
    return prepare_trainer(trainer)


def die() -> None:
    """Kill this worker, or raise an error in local mode."""
    if train.get_context().get_world_size() == 1:
        raise RuntimeError("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def losses(trainer: Any) -> dict[int, float]:
    """The loss of each step."""
    return {log["step"]: log["loss"] for log in trainer.state.log_history if "loss" in log}


def losses_of_one_process(path: Path, trainer: Callable[[], Any]) -> Any:
    """Train a plain Trainer in this process, with nothing of Drawbar but the tidying afterwards."""

    def function() -> dict[int, float]:
        plain = trainer()
        plain.train()
        return losses(plain)

    return Runs.fit(function, path, num_workers=0, max_failures=0).return_value


class Tiny:
    """Helpers for training functions, which also work without Drawbar."""

    SHARDED = SHARDED
    windows = staticmethod(windows)
    gpt = staticmethod(tiny_gpt)
    trainer = staticmethod(tiny_trainer)
    losses = staticmethod(losses)


class Runs:
    """Ways to run training functions, and helpers for those that use Drawbar."""

    on_ray = staticmethod(on_ray)
    losses_of_one_process = staticmethod(losses_of_one_process)

    @staticmethod
    def fit(
        function: Callable[[], Any],
        path: Path,
        num_workers: int = 2,
        max_failures: int = 1,
        checkpoint_config: CheckpointConfig | None = None,
        resume: Any = "auto",
        **options: Any,
    ) -> Result:
        """Run a training function below a folder."""
        return TorchTrainer(
            function,
            scaling_config=ScalingConfig(num_workers=num_workers),
            run_config=RunConfig(
                name="run",
                storage_path=path,
                failure_config=FailureConfig(max_failures=max_failures),
                checkpoint_config=checkpoint_config or CheckpointConfig(),
                resume=resume,
            ),
            **options,
        ).fit()


@pytest.fixture(scope="session")
def tiny() -> type[Tiny]:
    return Tiny


@pytest.fixture(scope="session")
def runs() -> type[Runs]:
    return Runs


@pytest.fixture(scope="module", autouse=True)
def _keep_environment(keep_environment: None) -> None:
    """Use `keep_environment` in all modules: some of their tests run in this process."""


@pytest.fixture(scope="module", autouse=True)
def _fork_workers(preload_transformers: None) -> None:
    """Use the fork server in all modules; `tests/train` starts workers without it."""
