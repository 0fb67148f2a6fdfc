"""Train a classifier of handwritten digits on two workers."""

import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset

from drawbar.torch import TorchTrainer, prepare_data_loader, prepare_model
from drawbar.train import ScalingConfig, report


def train_digits(config):
    images, labels = (torch.tensor(array) for array in load_digits(return_X_y=True))
    dataset = TensorDataset(images.float() / 16, labels)
    loader = prepare_data_loader(DataLoader(dataset, batch_size=32, shuffle=True))
    model = prepare_model(torch.nn.Linear(64, 10))
    optimizer = torch.optim.Adam(model.parameters(), lr=config["lr"])
    for epoch in range(config["epochs"]):
        total = 0.0
        for x, y in loader:
            loss = torch.nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total += loss.item()
        report({"epoch": epoch, "loss": total / len(loader)})


if __name__ == "__main__":
    trainer = TorchTrainer(
        train_digits,
        train_loop_config={"epochs": 8, "lr": 0.01},
        scaling_config=ScalingConfig(num_workers=2),
    )
    result = trainer.fit()
    print(result.metrics, "in", result.path)
