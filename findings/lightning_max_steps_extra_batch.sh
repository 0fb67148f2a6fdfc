#!/usr/bin/env bash
# Library: lightning 2.6.6, torch 2.13.0.
# Guess: a checkpoint of a complete epoch resumes at batch 0 of the next epoch. Whether the new
#   Trainer stops by `max_epochs` or by `max_steps` has no influence on the next batch.
# Behaviour: with `max_epochs`, this is true. With `max_steps`, Lightning opens the complete epoch
#   again: it trains one extra batch in epoch 0, with `batch_idx=4` of an epoch of 4 batches. All
#   later steps are shifted by one batch, so the run ends with other batches than a run without
#   an interruption.
# Output (epoch, batch_idx, row):
#   max_epochs: [(1, 0, 0), (1, 1, 1), (1, 2, 2), (1, 3, 3)]
#   max_steps:  [(0, 4, 0), (1, 0, 0), (1, 1, 1), (1, 2, 2)]
# Why it matters: large models are trained with `max_steps`, and each restart from the checkpoint
#   of an epoch trains one row too often and, in the end, one row too few.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "torch==2.13.0" "lightning==2.6.6"
cd "$folder"
venv/bin/python - <<'PROGRAM'
import logging
import warnings

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append((self.current_epoch, batch_idx, int(batch[0])))
        return self.layer(batch[0].float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(ckpt_path=None, **limits):
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(dirpath=".", filename="{epoch}")],
        **limits,
    )
    loader = DataLoader(TensorDataset(torch.arange(4)[:, None]), batch_size=1)
    trainer.fit(model, loader, ckpt_path=ckpt_path)
    return model.batches


fit(max_epochs=1)
by_epochs = fit("epoch=0.ckpt", max_epochs=2)
by_steps = fit("epoch=0.ckpt", max_epochs=-1, max_steps=8)
print("max_epochs:", by_epochs)
print("max_steps: ", by_steps)
assert by_epochs == [(1, 0, 0), (1, 1, 1), (1, 2, 2), (1, 3, 3)]
assert by_steps == [(0, 4, 0), (1, 0, 0), (1, 1, 1), (1, 2, 2)]
PROGRAM
