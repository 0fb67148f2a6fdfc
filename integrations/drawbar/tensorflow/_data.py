"""prepare_dataset_shard: use a Ray Data shard under a tf.distribute strategy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf


def prepare_dataset_shard(tf_dataset_shard: tf.data.Dataset) -> tf.data.Dataset:
    """Turn off auto-sharding for a shard and prefetch its batches.

    By default, `MultiWorkerMirroredStrategy` splits a dataset between the workers, even if it is
    already split, like a Ray Data shard.

    Args:
        tf_dataset_shard: Batched rows of this worker.

    Returns:
        The same data, prefetched and not split again.

    Example:
        ```python
        shard = drawbar.train.get_dataset_shard("train").to_tf("x", "y", batch_size=32)
        model.fit(prepare_dataset_shard(shard), epochs=5)
        ```
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf_dataset_shard.with_options(options).prefetch(tf.data.AUTOTUNE)
