"""API for integrations that build on drawbar.torch."""

from drawbar.torch._compat import disable_deepspeed_shm, has_exact_state
from drawbar.torch._global_batch import (
    check_epoch_size,
    drop_incomplete_step,
    iter_complete_steps,
)
from drawbar.torch._in_place import InPlaceTraining, find_training
from drawbar.torch._sampler import EpochPosition, EpochSampler, num_rank_items
from drawbar.torch._stream_position import is_huggingface_stream, preserve_random_state
from drawbar.torch._training_state import CannotRecoverError
from drawbar.train.backend import set_public_module

__all__ = [
    "CannotRecoverError",
    "EpochPosition",
    "EpochSampler",
    "InPlaceTraining",
    "check_epoch_size",
    "disable_deepspeed_shm",
    "drop_incomplete_step",
    "find_training",
    "has_exact_state",
    "is_huggingface_stream",
    "iter_complete_steps",
    "num_rank_items",
    "preserve_random_state",
]

set_public_module(globals())
