"""A plain TRL script, for torchrun or drawbar launch: a GPT-2 is tuned on a help page."""

import argparse
import gc
import pydoc
import tempfile

import datasets
import torch
import torch.distributed as dist
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer


def byte_tokenizer():
    """Create a tokenizer that needs no download: one token per byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: n for n, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=alphabet[0], pad_token=alphabet[0]
    )


def train(steps):
    set_seed(0)
    text = pydoc.plain(pydoc.render_doc("argparse"))
    texts = [text[i : i + 60] for i in range(0, len(text), 60)]
    gpt = GPT2Config(
        vocab_size=256,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    with tempfile.TemporaryDirectory() as folder:
        trainer = SFTTrainer(
            GPT2LMHeadModel(gpt),
            SFTConfig(
                output_dir=folder,
                max_steps=steps,
                max_length=64,
                per_device_train_batch_size=16,
                learning_rate=3e-3,
                logging_steps=10,
                save_strategy="no",
                disable_tqdm=True,
                report_to="none",
                use_cpu=not torch.cuda.is_available(),
                bf16=False,
            ),
            train_dataset=datasets.Dataset.from_dict({"text": texts}),
            processing_class=byte_tokenizer(),
        )
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
