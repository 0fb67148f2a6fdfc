"""A sweep on scikit-learn's handwritten digits: Ray Tune's ASHA over trials of two workers each.

Bad trials are stopped early. Run it again after it was killed to run the missing trials.
"""

import argparse
import os

import matplotlib
import torch
from ray import tune
from ray.tune.schedulers import ASHAScheduler
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawbar import train
from drawbar.torch import TorchTrainer, prepare_data_loader, prepare_model
from drawbar.train.runs import get_default_storage_path

EPOCHS = 8


def train_func(config):
    pixels, labels = load_digits(return_X_y=True)
    data = TensorDataset(torch.tensor(pixels / 16).float(), torch.tensor(labels))
    training, held_out = torch.utils.data.random_split(
        data, [0.75, 0.25], torch.Generator().manual_seed(0)
    )
    width = config["width"]
    model = prepare_model(nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=config["lr"], momentum=0.9)
    loader = prepare_data_loader(DataLoader(training, batch_size=32, shuffle=True))
    start = 0
    if checkpoint := train.get_checkpoint():
        state = torch.load(f"{checkpoint.path}/state.pt")
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["epoch"] + 1
    for epoch in range(start, EPOCHS):
        for batch, target in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(batch), target).backward()
            optimizer.step()
        with torch.no_grad():
            batch, target = held_out[:]
            accuracy = (model(batch).argmax(1) == target).float().mean().item()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        with train.checkpoint_dir() as path:
            if train.get_context().get_world_rank() == 0:
                torch.save(state, path / "state.pt")
            train.report({"accuracy": accuracy, "epoch": epoch}, checkpoint=path)


def plot(results, path):
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    for result in results:
        config = result.config["train_loop_config"]
        label = f"lr {config['lr']:.4f}, width {config['width']}"
        result.metrics_dataframe.plot("epoch", "accuracy", ax=axes, label=label, marker="o")
    axes.set(ylabel="accuracy on held out digits", title="a trial that ends early was stopped")
    axes.grid()
    figure.savefig(path)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("num-workers", 2), ("trials", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--storage-path", default=get_default_storage_path())
    args = parser.parse_args()
    storage = os.path.expanduser(args.storage_path)
    trainer = TorchTrainer(
        train_func, scaling_config=train.ScalingConfig(num_workers=args.num_workers)
    )
    space = {"lr": tune.loguniform(0.01, 0.3), "width": tune.choice([16, 64])}
    if tune.Tuner.can_restore(f"{storage}/digits-sweep"):
        tuner = tune.Tuner.restore(
            f"{storage}/digits-sweep", trainer.as_trainable(), resume_unfinished=True
        )
    else:
        tuner = tune.Tuner(
            trainer.as_trainable(),
            param_space={"train_loop_config": space},
            tune_config=tune.TuneConfig(
                metric="accuracy",
                mode="max",
                num_samples=args.trials,
                scheduler=ASHAScheduler(max_t=EPOCHS, grace_period=2, reduction_factor=2),
            ),
            run_config=tune.RunConfig(name="digits-sweep", storage_path=storage, verbose=1),
        )
    results = tuner.fit()
    plot(results, f"{storage}/digits-sweep/sweep.png")
    best = results.get_best_result()
    print(f"best: {best.metrics['accuracy']:.3f} with {best.config['train_loop_config']}")
    print(f"{best.checkpoint}\n{storage}/digits-sweep/sweep.png")
