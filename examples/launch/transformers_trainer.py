"""A plain Transformers script, for torchrun or drawbar launch: a GPT-2 learns a help page."""

import argparse
import gc
import pydoc
import tempfile

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

WINDOW = 64


def windows():
    text = pydoc.plain(pydoc.render_doc("argparse")).encode()
    pieces = (list(text[i : i + WINDOW]) for i in range(0, len(text) - WINDOW, WINDOW))
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def train(steps):
    set_seed(0)
    gpt = GPT2Config(
        vocab_size=256,
        n_positions=WINDOW,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
        loss_type="ForCausalLMLoss",
    )
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=16,
            learning_rate=3e-3,
            logging_steps=10,
            save_strategy="no",
            disable_tqdm=True,
            report_to="none",
            use_cpu=not torch.cuda.is_available(),
            seed=0,
        )
        trainer = Trainer(GPT2LMHeadModel(gpt), args, train_dataset=windows())
        result = trainer.train()
    if trainer.is_world_process_zero():
        print(f"loss {result.training_loss:.8f}")


def main(steps):
    train(steps)
    # The threads of a process group can abort the process at its exit, so destroy it. A model that
    # is wrapped in DistributedDataParallel keeps it alive, so delete the trainer before.
    gc.collect()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20)
    main(parser.parse_args().steps)
