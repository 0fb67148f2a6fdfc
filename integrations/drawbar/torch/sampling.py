"""Which samples each worker takes, and how far they have come: for integrations with loaders."""

from drawbar.torch._sampler import EpochSampler, Position, share_length
from drawbar.train.backend import as_public

__all__ = ["EpochSampler", "Position", "share_length"]

as_public(globals())
