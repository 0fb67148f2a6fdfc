"""A small GPT-2 learns Python's own documentation, byte by byte, on several workers.

Stop it and run it again, or run it with more --steps: it resumes from the latest checkpoint.
"""

import argparse
import pydoc

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

from drawbar import train
from drawbar.torch import TorchTrainer
from drawbar.train.runs import get_default_storage_path
from drawbar.transformers import prepare_trainer

WINDOW = 64
MODULES = ("argparse", "asyncio", "collections", "datetime", "json", "logging", "pathlib", "typing")


def windows():
    """Cut the help pages of some modules into pieces, with one token per byte."""
    pages = [pydoc.plain(pydoc.render_doc(name)) for name in MODULES]
    text = "".join(pages).encode()
    pieces = (list(text[i : i + WINDOW]) for i in range(0, len(text) - WINDOW, WINDOW))
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def train_func(config):
    *training, test = torch.utils.data.random_split(
        windows(), [0.9, 0.1], generator=torch.Generator().manual_seed(0)
    )
    gpt = GPT2Config(
        vocab_size=256,
        n_positions=WINDOW,
        n_embd=64,
        n_layer=2,
        n_head=4,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLMLoss",
    )
    args = TrainingArguments(
        output_dir=config["output_dir"],
        max_steps=config["steps"],
        per_device_train_batch_size=32,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        logging_steps=20,
        eval_strategy="steps",
        eval_steps=50,
        save_steps=50,
        disable_tqdm=True,
        report_to="none",
    )
    trainer = Trainer(GPT2LMHeadModel(gpt), args, train_dataset=training[0], eval_dataset=test)
    trainer = prepare_trainer(trainer)
    trainer.train()


def continue_text(path, text, count=60):
    """Generate text with the trained model in plain Transformers."""
    model = GPT2LMHeadModel.from_pretrained(path)
    tokens = torch.tensor([list(text.encode())])
    for _ in range(count):
        best = model(tokens[:, -WINDOW:]).logits[0, -1].argmax()
        tokens = torch.cat([tokens, best.view(1, 1)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("num-workers", 2), ("steps", 200)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--storage-path", default=get_default_storage_path())
    args = parser.parse_args()
    run = train.RunConfig(name="gpt", storage_path=args.storage_path)
    result = TorchTrainer(
        train_func,
        train_loop_config={"steps": args.steps, "output_dir": f"{args.storage_path}/gpt-output"},
        scaling_config=train.ScalingConfig(num_workers=args.num_workers),
        run_config=run,
    ).fit()
    print(f"{result.metrics}\n{result.checkpoint}")
    print(repr(continue_text(result.checkpoint.path, "class datetime(")))
