"""Which samples each worker takes, and how far they have come: for integrations with loaders."""

from drawbar.torch._sampler import EpochSampler, Position, share_length

__all__ = ["EpochSampler", "Position", "share_length"]
