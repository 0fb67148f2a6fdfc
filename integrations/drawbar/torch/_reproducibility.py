"""Seed all random number generators and derive per-rank seeds.

All seeds of a run are derived from few numbers: the user's seed, the epoch, and the rank.
`derive_seed` mixes them, so that no two streams of random numbers coincide.
"""

from __future__ import annotations

import hashlib
import os
import random
from functools import partial

import numpy as np
import torch

from drawbar.torch._attempt_cleanup import on_attempt_end, set_env

_seed: int | None = None


def enable_reproducibility(seed: int = 0) -> None:
    """Seed all random number generators and use deterministic algorithms.

    A training function then computes the same numbers again on the same hardware and world size.
    Call it first in the training function:

    - Python's `random`, NumPy, and PyTorch (all devices) get the same seed on every rank, so that
      all ranks create the same model.
    - cuDNN does not choose kernels by timing.
    - PyTorch uses deterministic algorithms, or raises an error if there is none
      (https://docs.pytorch.org/docs/stable/notes/randomness.html). They can be slower.
    - `prepare_data_loader()` derives the order of the data from this seed, and the seeds of loader
      processes from the seed and the rank.

    All settings are restored at the end of the training function.

    Args:
        seed: Seed from 0 to 2**32 - 1.

    Raises:
        ValueError: The seed is out of range.

    Example:
        ```python
        def train_func(config):
            drawbar.torch.enable_reproducibility(seed=42)
            model = drawbar.torch.prepare_model(make_model())
        ```
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2**32 - 1, found {seed}.")
    on_attempt_end(_set_seed, _seed)
    _set_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    cudnn = torch.backends.cudnn
    on_attempt_end(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled())
    on_attempt_end(partial(setattr, cudnn, "deterministic", cudnn.deterministic))
    on_attempt_end(partial(setattr, cudnn, "benchmark", cudnn.benchmark))
    torch.use_deterministic_algorithms(True)
    cudnn.deterministic = True
    cudnn.benchmark = False
    # Otherwise torch raises an error at the first matrix product on CUDA.
    if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        set_env("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def current_seed() -> int | None:
    """Return the seed of `enable_reproducibility`; None if it was not called in this attempt."""
    return _seed


def derive_seed(*parts: int) -> int:
    """Hash numbers to a seed of 63 bits."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _set_seed(seed: int | None) -> None:
    global _seed
    _seed = seed
