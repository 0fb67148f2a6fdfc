"""A custom TensorFlow training loop on scikit-learn's handwritten digits, on several workers.

Stop it and run it again, or run it with more --epochs: it resumes from the latest checkpoint.
"""

import argparse

import matplotlib
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from drawbar import train
from drawbar.tensorflow import TensorflowTrainer, prepare_dataset_shard
from drawbar.train.runs import get_default_storage_path

BATCH = 96  # over all workers


def digits():
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    return train_test_split(images, labels, test_size=0.2, random_state=0)


def network(keras):
    layers = keras.layers
    return keras.Sequential(
        [
            layers.Input((8, 8, 1)),
            *(layers.Conv2D(16, 3, activation="relu"), layers.Conv2D(32, 3, activation="relu")),
            *(layers.Flatten(), layers.Dense(64, activation="relu"), layers.Dense(10)),
        ]
    )


def train_loop(config):
    import keras
    import tensorflow as tf

    keras.utils.set_random_seed(0)
    x, x_test, y, y_test = digits()
    strategy = tf.distribute.MultiWorkerMirroredStrategy()
    with strategy.scope():
        model, optimizer = network(keras), keras.optimizers.Adam(0.003)
        optimizer.build(model.trainable_variables)
    loss_of = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    progress = tf.train.Checkpoint(model=model, optimizer=optimizer)

    @tf.function
    def step(batch):
        def on_replica(x, y):
            with tf.GradientTape() as tape:
                loss = loss_of(y, model(x, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            everyones = tf.distribute.get_replica_context().all_reduce("mean", gradients)
            optimizer.apply(everyones)
            return loss

        return strategy.reduce("mean", strategy.run(on_replica, batch), axis=None)

    context = train.get_context()
    workers, rank = context.get_world_size(), context.get_world_rank()
    begin = 0
    if (checkpoint := train.get_checkpoint()) is not None:
        with checkpoint.as_directory() as path:
            progress.read(f"{path}/state").assert_consumed()
        begin = checkpoint.manifest.metrics["epoch"] + 1
    for epoch in range(begin, config["epochs"]):
        own = np.random.default_rng(epoch).permutation(len(x) // BATCH * BATCH)[rank::workers]
        rows = tf.data.Dataset.from_tensor_slices((x[own], y[own])).batch(BATCH // workers)
        shards = strategy.experimental_distribute_dataset(prepare_dataset_shard(rows))
        losses = [float(step(batch)) for batch in shards]
        accuracy = (model(x_test).numpy().argmax(1) == y_test).mean()
        metrics = {"epoch": epoch, "loss": sum(losses) / len(losses), "accuracy": accuracy}
        with train.checkpoint_dir() as path:
            progress.write(f"{path}/state")  # by all ranks: TensorFlow has them meet here
            train.report(metrics, checkpoint=path if rank == 0 else None)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    for name, value in (("num-workers", 2), ("epochs", 12)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--storage-path", default=get_default_storage_path())
    args = parser.parse_args()
    config = {"epochs": args.epochs}
    workers = train.ScalingConfig(num_workers=args.num_workers)
    run = train.RunConfig(name="digits-tensorflow", storage_path=args.storage_path)
    result = TensorflowTrainer(
        train_loop, train_loop_config=config, scaling_config=workers, run_config=run
    ).fit()

    matplotlib.use("Agg")
    rows = result.metrics_dataframe.query("rank == 0")
    curves = rows.plot("epoch", ["loss", "accuracy"], subplots=True, grid=True)
    curves[0].figure.savefig(f"{result.path}/curves.png")
    print(f"{result.metrics}\n{result.checkpoint}\n{result.path}/curves.png")
