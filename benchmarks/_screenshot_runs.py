"""Train the networks that the screenshots of the web UI show: `python train.py STORAGE`.

`benchmarks.screenshots` runs a copy of this file, because the pages show its path and its lines.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawbar import train
from drawbar.torch import TorchTrainer, prepare_data_loader, prepare_model

STEPS = 200


def train_func(config: dict[str, Any]) -> None:
    """Train a convolutional network on handwritten digits."""
    torch.manual_seed(0)
    rank = train.get_context().get_world_rank()
    net = nn.Sequential(
        *(nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 64, 3, padding=1), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64 * 64, 10)),
    )
    first = 0
    if checkpoint := train.get_checkpoint():
        state = torch.load(Path(checkpoint.path) / "state.pt")
        net.load_state_dict(state["net"])
        first = state["step"] + 1
    print(f"\x1b[1mrank {rank}\x1b[0m: training from step {first}")
    model = prepare_model(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"])
    for step, (x, y) in zip(range(first, config["steps"]), batches(config), strict=False):
        if step == config.get("nan_at") and rank == 1:
            x[0] = float("nan")
        if not torch.isfinite(x).all():
            print(f"\x1b[31mERROR\x1b[0m: batch {step} contains NaN")
            raise ValueError(f"batch {step} contains NaN")
        output = model(x)
        loss = nn.functional.cross_entropy(output, y)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no type here
        norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0).item()
        optimizer.step()
        accuracy = (output.argmax(1) == y).float().mean().item()
        metrics = {"loss": loss.item(), "accuracy": accuracy, "grad_norm": norm}
        print(f"step {step:4d}  loss {loss.item():.3f}")
        report(metrics, {"net": net.state_dict(), "step": step} if step % 20 == 19 else None)
        if rank == 1 and step in config.get("kills", ()) and step - first > 40:
            os.kill(os.getpid(), signal.SIGKILL)


def batches(config: dict[str, Any]) -> Iterator[Any]:
    """Yield batches of scikit-learn's digits, epoch after epoch."""
    images, labels = importlib.import_module("sklearn.datasets").load_digits(return_X_y=True)
    x = torch.from_numpy(images.reshape(-1, 1, 8, 8).astype("float32") / 16)
    dataset = TensorDataset(x, torch.from_numpy(labels))
    loader = prepare_data_loader(DataLoader(dataset, batch_size=64, shuffle=True, drop_last=True))
    while True:
        yield from loader


def report(metrics: dict[str, Any], state: dict[str, Any] | None) -> None:
    """Report metrics, and on rank 0 the state as a checkpoint."""
    if state is None or train.get_context().get_world_rank() > 0:
        train.report(metrics)
        return
    with train.checkpoint_dir() as directory:
        torch.save(state, directory / "state.pt")
        train.report(metrics, checkpoint=directory)


def fit(name: str, storage: str, config: dict[str, Any]) -> None:
    """Train on two workers."""
    TorchTrainer(
        train_func,
        train_loop_config={"steps": STEPS, **config},
        scaling_config=train.ScalingConfig(num_workers=2),
        run_config=train.RunConfig(
            name=name,
            storage_path=storage,
            failure_config=train.FailureConfig(max_failures=2),
        ),
    ).fit()


def main(storage: str) -> None:
    """Run three trainings that finish, and one that fails after two restarts."""
    importlib.import_module("ray").init(include_dashboard=False)
    for lr in (0.01, 0.03, 0.1):
        fit(f"digits-lr-{lr}", storage, {"lr": lr})
    with contextlib.suppress(train.TrainingFailedError):
        fit("digits-cnn", storage, {"lr": 0.05, "kills": [50, 95], "nan_at": 148})


if __name__ == "__main__":
    main(sys.argv[1])
