"""Which samples each worker takes, and how far they have come: for integrations with loaders."""

from drawbar.torch._sampler import EpochPosition, EpochSampler, num_rank_items
from drawbar.train.backend import set_public_module

__all__ = ["EpochPosition", "EpochSampler", "num_rank_items"]

set_public_module(globals())
