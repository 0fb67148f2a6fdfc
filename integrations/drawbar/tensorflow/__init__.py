"""TensorFlow training on Ray: trainer, TF_CONFIG, and helpers."""

from drawbar.tensorflow._backend import TensorflowBackend, TensorflowConfig
from drawbar.tensorflow._checkpoint import TensorflowCheckpoint
from drawbar.tensorflow._data import prepare_dataset_shard
from drawbar.tensorflow._trainer import TensorflowTrainer
from drawbar.train.backend import set_public_module

__all__ = [
    "TensorflowBackend",
    "TensorflowCheckpoint",
    "TensorflowConfig",
    "TensorflowTrainer",
    "prepare_dataset_shard",
]

set_public_module(globals())
