"""Lightning steps per second, compared with a plain Trainer."""

from __future__ import annotations

import importlib
from typing import Any

from benchmarks._scenario import Samples, Side
from benchmarks.scenarios._steps import TOTAL, WORKERS, Steps, steps_scenario

BATCH = 512
HIDDEN = 512
INTEGRATIONS = {"drawbar": "drawbar.lightning", "ray.train": "ray.train.lightning"}


def train(side: Side) -> Samples:
    """Train an MLP by Lightning's Trainer; on Drawbar and ray.train by their strategies."""
    import lightning.pytorch as pl

    steps = Steps()

    class Ticks(pl.Callback):
        def on_train_batch_end(self, *args: Any) -> None:
            steps.tick()

    options: dict[str, Any] = {"strategy": "ddp", "devices": WORKERS}
    if side != "bare":
        integration = importlib.import_module(INTEGRATIONS[side])
        options = {
            "strategy": integration.RayDDPStrategy(),
            "plugins": [integration.RayLightningEnvironment()],
        }
    trainer = pl.Trainer(
        accelerator="cpu",
        max_steps=TOTAL,
        callbacks=[Ticks()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    if side != "bare":
        trainer = integration.prepare_trainer(trainer)
    trainer.fit(_module(pl))
    return steps.samples()


def _module(pl: Any) -> Any:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, TensorDataset

    class Classifier(pl.LightningModule):  # type: ignore[misc]  # has no types that mypy follows
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.Linear(128, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, HIDDEN), nn.ReLU()]
            self.net = nn.Sequential(*layers, nn.Linear(HIDDEN, 10))

        def training_step(self, batch: Any, index: int) -> Any:
            x, y = batch
            return nn.functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

        def train_dataloader(self) -> Any:
            inputs = torch.randn(BATCH * WORKERS * 30, 128)
            return DataLoader(TensorDataset(inputs, torch.randint(0, 10, (len(inputs),))), BATCH)

    return Classifier()


SCENARIO = steps_scenario(
    "lightning_steps", "Lightning steps of a small MLP, gloo, 2 workers", train
)
