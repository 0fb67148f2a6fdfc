"""A network on rows that Ray Data scales and streams, and that are validated from a table.

Which of scikit-learn's breast tumours are benign, of thirty measurements each. Stop it and run it
again, or run it with more --epochs: it resumes from the latest checkpoint within the epoch.
"""

import argparse
import os

import matplotlib
import ray
import torch
from ray.data.preprocessors import Chain, Concatenator, StandardScaler
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from torch import nn

from drawbar import train
from drawbar.torch import TorchTrainer, enable_reproducibility, prepare_model
from drawbar.train.runs import get_default_storage_path


def train_loop(config):
    enable_reproducibility(seed=0)
    net = nn.Sequential(nn.Linear(30, 32), nn.ReLU(), nn.Linear(32, 2))
    model = prepare_model(net)  # `net` made data-parallel
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    tumours, held_out = train.get_dataset_shard("train"), train.get_dataset_shard("valid")
    for epoch in range(restore(net, optimizer), config["epochs"]):
        batches = tumours.iter_torch_batches(
            batch_size=32, local_shuffle_buffer_size=256, local_shuffle_seed=0
        )
        losses = [step(model, optimizer, batch["x"], batch["target"]) for batch in batches]
        metrics = {"epoch": epoch, "loss": sum(losses) / len(losses)}
        metrics["accuracy"] = accuracy(net, held_out)
        if train.get_context().get_world_rank() > 0:
            train.report(metrics)
        else:
            with train.checkpoint_dir() as path:
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "epoch": epoch}, path / "state.pt")
                train.report(metrics, checkpoint=path)


def step(model, optimizer, x, y):
    loss = nn.functional.cross_entropy(model(x.float()), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(net, shard):
    (batch,) = shard.iter_torch_batches(batch_size=1000)
    return (net(batch["x"].float()).argmax(1) == batch["target"]).float().mean().item()


def restore(net, optimizer):
    if (checkpoint := train.get_checkpoint()) is None:
        return 0
    with checkpoint.as_directory() as path:
        state = torch.load(f"{path}/state.pt")
    net.load_state_dict(state["net"])
    optimizer.load_state_dict(state["optimizer"])
    return state["epoch"] + 1


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    spared = max((os.cpu_count() or 2) - 1, 1)  # leave one CPU for Ray Data
    parser.add_argument("--num-workers", type=int, default=min(2, spared))
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--storage-path", default=get_default_storage_path())
    args = parser.parse_args()
    frame = load_breast_cancer(as_frame=True).frame
    training, held_out = train_test_split(frame, test_size=0.2, random_state=0)
    measurements = [name for name in frame.columns if name != "target"]
    scaled = Chain(StandardScaler(measurements), Concatenator(measurements, "x"))
    result = TorchTrainer(
        train_loop,
        train_loop_config={"epochs": args.epochs, "lr": 0.002},
        datasets={"train": ray.data.from_pandas(training), "valid": held_out},
        dataset_config=train.DataConfig(preprocessor=scaled),
        scaling_config=train.ScalingConfig(num_workers=args.num_workers),
        run_config=train.RunConfig(name="tumours", storage_path=args.storage_path),
    ).fit()

    matplotlib.use("Agg")
    rows = result.metrics_dataframe.query("rank == 0")
    curves = rows.plot("epoch", ["loss", "accuracy"], subplots=True, grid=True)
    curves[0].figure.savefig(f"{result.path}/curves.png")
    read = [each.num_rows for each in result.data_ledger if each.dataset == "train"]
    print(f"{result.metrics}\n{result.checkpoint}\nrows of each epoch: {read}")
    print(f"{result.path}/curves.png")
