"""A small convolutional network on scikit-learn's handwritten digits, on several workers.

Stop it and run it again, or run it with more --epochs: it resumes from the latest checkpoint.
"""

import argparse

import matplotlib
import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawbar import train
from drawbar.torch import TorchTrainer, enable_reproducibility, prepare_data_loader, prepare_model
from drawbar.train.runs import get_default_storage_path


def digits():
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 1, 8, 8).astype("float32") / 16
    parts = train_test_split(images, labels, test_size=0.2, random_state=0)
    x, x_test, y, y_test = (torch.from_numpy(part) for part in parts)
    return TensorDataset(x, y), TensorDataset(x_test, y_test)


def network():
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU()),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 16, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def train_loop(config):
    enable_reproducibility(seed=0)
    training, test = digits()
    loader = prepare_data_loader(DataLoader(training, batch_size=32, shuffle=True))
    test_loader = prepare_data_loader(DataLoader(test, len(test)), add_dist_sampler=False)
    net = network()
    model = prepare_model(net)  # `net` made data-parallel
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    for epoch in range(restore(net, optimizer), config["epochs"]):
        loader.sampler.set_epoch(epoch)
        losses = [step(model, optimizer, x, y) for x, y in loader]
        loss = sum(losses) / len(losses)
        metrics = {"epoch": epoch, "loss": loss, "accuracy": accuracy(net, test_loader)}
        if train.get_context().get_world_rank() > 0:
            train.report(metrics)
        else:
            with train.checkpoint_dir() as path:
                state = {"net": net.state_dict(), "optimizer": optimizer.state_dict()}
                torch.save({**state, "epoch": epoch}, path / "state.pt")
                train.report(metrics, checkpoint=path)


def step(model, optimizer, x, y):
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(net, loader):
    x, y = next(iter(loader))
    return (net(x).argmax(1) == y).float().mean().item()


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
    for name, value in (("num-workers", 2), ("epochs", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--storage-path", default=get_default_storage_path())
    args = parser.parse_args()
    config = {"epochs": args.epochs, "lr": 0.002}
    workers = train.ScalingConfig(num_workers=args.num_workers)
    run = train.RunConfig(name="digits", storage_path=args.storage_path)
    result = TorchTrainer(
        train_loop, train_loop_config=config, scaling_config=workers, run_config=run
    ).fit()

    matplotlib.use("Agg")
    rows = result.metrics_dataframe.query("rank == 0")
    curves = rows.plot("epoch", ["loss", "accuracy"], subplots=True, grid=True)
    curves[0].figure.savefig(f"{result.path}/curves.png")
    print(f"{result.metrics}\n{result.checkpoint}\n{result.path}/curves.png")
