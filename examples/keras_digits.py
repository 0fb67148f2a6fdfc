"""A small convolutional network in Keras 3 on scikit-learn's handwritten digits, on any backend.

Stop it and run it again, or run it with more --epochs: it resumes from the latest checkpoint.
"""

import argparse

import matplotlib
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from drawbar import train
from drawbar.keras import (
    KerasTrainer,
    ReportCheckpointCallback,
    load_state,
    prepare_dataset,
    prepare_model,
)
from drawbar.train.runs import get_default_storage_path


def digits():
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    return train_test_split(images, labels, test_size=0.2, random_state=0)


def network(keras):
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            *(layers.Conv2D(16, 3, activation="relu"), layers.BatchNormalization()),
            *(layers.Conv2D(32, 3, activation="relu"), layers.Flatten(), layers.Dropout(0.2)),
            *(layers.Dense(64, activation="relu"), layers.Dense(10)),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(0.003), loss, metrics=["accuracy"])
    return model


def train_loop(config):
    import keras  # with the backend that the trainer was given

    x, x_test, y, y_test = digits()
    model = prepare_model(network(keras))
    reduce = keras.callbacks.ReduceLROnPlateau("val_loss", patience=2)
    model.fit(
        prepare_dataset(x, y, batch_size=64, shuffle=True),  # 64 rows over all workers
        validation_data=prepare_dataset(x_test, y_test, batch_size=128),
        epochs=config["epochs"],
        initial_epoch=load_state(model),
        callbacks=[reduce, ReportCheckpointCallback()],
        verbose=0,
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("num-workers", 2), ("epochs", 8)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--storage-path", default=get_default_storage_path())
    parser.add_argument("--backend", choices=("torch", "jax", "tensorflow"), default="torch")
    args = parser.parse_args()
    result = KerasTrainer(
        train_loop,
        keras_backend=args.backend,
        train_loop_config={"epochs": args.epochs},
        scaling_config=train.ScalingConfig(num_workers=args.num_workers),
        run_config=train.RunConfig(name="digits-keras", storage_path=args.storage_path),
    ).fit()

    matplotlib.use("Agg")
    rows = result.metrics_dataframe.query("rank == 0").reset_index(drop=True)
    curves = rows[["loss", "val_loss", "accuracy", "val_accuracy"]].plot(grid=True)
    curves.figure.savefig(f"{result.path}/curves.png")
    print(f"{result.metrics}\n{result.checkpoint}\n{result.path}/curves.png")
