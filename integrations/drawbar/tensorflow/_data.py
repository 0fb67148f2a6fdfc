"""Datasets of one worker, as a strategy of several takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tensorflow as tf


def prepare_dataset_shard(tf_dataset_shard: tf.data.Dataset) -> tf.data.Dataset:
    """Have a strategy take a dataset as this worker's own part, whole and in time.

    By itself `MultiWorkerMirroredStrategy` splits what it is given between the workers, again if it
    was split before, as a shard of Ray Data is: `get_dataset_shard("train").to_tf(...)`.

    Args:
        tf_dataset_shard: The worker's own part, in batches.

    Returns:
        The same data, which is loaded ahead and not split again.
    """
    import tensorflow as tf

    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    return tf_dataset_shard.with_options(options).prefetch(tf.data.AUTOTUNE)
