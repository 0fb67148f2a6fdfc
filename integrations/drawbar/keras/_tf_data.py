"""Read array batches with tf.data instead of Python calls.

Reading batches from a `PyDataset` needs one Python call per batch, which takes twice as long.
"""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from drawbar.keras._batches import ArrayBatches
from drawbar.keras._data import rank_rows_in_graph


def as_tf_dataset(batches: ArrayBatches) -> tuple[tf.data.Dataset, Any]:
    """Return a dataset of the batches of an epoch, and a callback that sets each epoch's order."""
    with tf.device("CPU"):
        arrays = keras.tree.map_structure(tf.convert_to_tensor, batches.arrays)
        order = tf.Variable(np.asarray(batches.epoch_order()), dtype=tf.int64)

    @tf.autograph.experimental.do_not_convert  # type: ignore[untyped-decorator]
    def batch(index: Any) -> Any:
        begin = index * batches.batch_size
        rows = rank_rows_in_graph(
            order[begin : begin + batches.batch_size], batches.rank, batches.size
        )
        parts = keras.tree.map_structure(lambda part: tf.gather(part, rows), arrays)
        return parts if len(parts) > 1 else parts[0]

    def advance(*epoch_and_logs: Any, logs: Any = None) -> None:
        batches.on_epoch_end()
        order.assign(np.asarray(batches.epoch_order()))

    dataset = tf.data.Dataset.range(len(batches)).map(batch).prefetch(tf.data.AUTOTUNE)
    # Keras also calls on_epoch_end of a `PyDataset` once before the first epoch.
    return dataset, keras.callbacks.LambdaCallback(on_train_begin=advance, on_epoch_end=advance)
