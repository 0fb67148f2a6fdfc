"""API for integrations with data loaders: sharding of samplers and positions in an epoch."""

from drawbar.torch._sampler import EpochPosition, EpochSampler, num_rank_items
from drawbar.train.backend import set_public_module

__all__ = ["EpochPosition", "EpochSampler", "num_rank_items"]

set_public_module(globals())
