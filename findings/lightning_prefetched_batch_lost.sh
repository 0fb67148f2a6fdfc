#!/usr/bin/env bash
# Library: lightning 2.6.6, torchdata 0.11.0, torch 2.13.0.
# Guess: Lightning saves the state of a `StatefulDataLoader` with each checkpoint, so a run that
#   resumes from step 3 continues with the fourth batch.
# Behaviour: this is true if the loader has a length. For an iterable dataset without a length,
#   Lightning reads one batch ahead to find the last one. The loader's state counts this batch, but
#   the checkpoint does not contain it, so the resumed run never trains on it.
# Output (batch_idx, row):
#   with a length:    [(0, 0), (1, 1), (2, 2)], resumed: [(3, 3), (4, 4), (5, 5)]
#   without a length: [(0, 0), (1, 1), (2, 2)], resumed: [(3, 4), (4, 5)]
# Why it matters: streamed datasets have no length and are the reason to use this loader. Each
#   restart skips one batch per rank, and `batch_idx` does not show it.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3.11 -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet \
    "torch==2.13.0" "lightning==2.6.6" "torchdata==0.11.0" "numpy==2.4.6"
cd "$folder"
venv/bin/python -W ignore - <<'PROGRAM'
import logging

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Stream(torch.utils.data.IterableDataset):
    next_row = 0

    def __iter__(self):
        while self.next_row < 6:
            self.next_row += 1
            yield self.next_row - 1
        self.next_row = 0

    def state_dict(self):
        return {"next_row": self.next_row}

    def load_state_dict(self, state):
        self.next_row = state["next_row"]


class SizedStream(Stream):
    def __len__(self):
        return 6


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.batches = []

    def training_step(self, batch, batch_idx):
        self.batches.append((batch_idx, int(batch)))
        return self.layer(batch.float()).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def fit(dataset, ckpt_path=None, **limits):
    model = Model()
    trainer = lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ModelCheckpoint(type(dataset).__name__, "{step}", every_n_train_steps=3)],
        **limits,
    )
    trainer.fit(model, StatefulDataLoader(dataset, batch_size=1), ckpt_path=ckpt_path)
    return model.batches


def compare(name, dataset_type):
    before = fit(dataset_type(), max_steps=3)
    path = f"{dataset_type.__name__}/step=3.ckpt"
    resumed = fit(dataset_type(), path, max_epochs=1)
    print(f"{name:17} {before}, resumed: {resumed}")
    assert before == [(0, 0), (1, 1), (2, 2)]
    return resumed


assert compare("with a length:", SizedStream) == [(3, 3), (4, 4), (5, 5)]
assert compare("without a length:", Stream) == [(3, 4), (4, 5)]
PROGRAM
