"""A small network on scikit-learn's handwritten digits with Hugging Face Accelerate.

Stop it and run it again, or run it with more --epochs: it resumes from the latest checkpoint.
"""

import argparse

import torch
from accelerate import Accelerator
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from drawbar import train
from drawbar.accelerate import launch, load_state, report_state
from drawbar.torch import prepare_data_loader
from drawbar.train.runs import get_default_storage_path


def digits():
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.astype("float32") / 16, labels, test_size=0.2, random_state=0)
    x, x_test, y, y_test = (torch.from_numpy(part) for part in parts)
    return TensorDataset(x, y), (x_test, y_test)


def train_func(epochs):
    torch.manual_seed(0)
    accelerator = Accelerator()
    training, (x_test, y_test) = digits()
    loader = prepare_data_loader(DataLoader(training, batch_size=32, shuffle=True))
    network = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.Adam(network.parameters(), lr=0.002)
    model, optimizer = accelerator.prepare(network, optimizer)
    saved = load_state(accelerator)
    for epoch in range(saved["epoch"] + 1 if saved else 0, epochs):
        for x, y in loader:
            loss = nn.functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        with torch.no_grad():
            right = model(x_test.to(accelerator.device)).argmax(1).cpu() == y_test
        loss = accelerator.reduce(loss.detach(), "mean")
        metrics = {"epoch": epoch, "loss": loss, "accuracy": right.float().mean()}
        report_state(accelerator, metrics)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("num-workers", 2), ("epochs", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--storage-path", default=get_default_storage_path())
    args = parser.parse_args()
    workers = train.ScalingConfig(num_workers=args.num_workers)
    run = train.RunConfig(name="accelerate-digits", storage_path=args.storage_path)
    result = launch(train_func, (args.epochs,), workers, run_config=run)
    print(f"{result.metrics}\n{result.checkpoint}")
