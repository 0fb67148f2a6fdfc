"""API for integrations that build on drawbar.accelerate."""

from drawbar.accelerate._data_position import find_sampler
from drawbar.accelerate._global_batch import drop_incomplete_steps
from drawbar.accelerate._prepare import allow_sharding_on_cpu, require_matching_ranks
from drawbar.train.backend import set_public_module

__all__ = [
    "allow_sharding_on_cpu",
    "drop_incomplete_steps",
    "find_sampler",
    "require_matching_ranks",
]

set_public_module(globals())
