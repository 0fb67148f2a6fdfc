"""Seed all random number generators and derive per-rank seeds.

`derive_seed` computes the seeds of data loaders from the user's seed, the rank, the epoch, and the
samples consumed. It hashes these numbers, so ranks and epochs have unrelated random numbers.
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

    Two runs with the same seed, hardware, and world size then give the same results. Call this
    function first in the training function:

    - Python's `random`, NumPy, and PyTorch (all devices) get the same seed on every rank, so that
      all ranks create the same model.
    - `torch.backends.cudnn.deterministic` is True, and `torch.backends.cudnn.benchmark` is False.
    - PyTorch uses deterministic algorithms, which can be slower. An operation that has none raises
      an error (https://docs.pytorch.org/docs/stable/notes/randomness.html).
    - `prepare_data_loader()` shuffles with this seed. It seeds each rank's DataLoader workers
      differently. A `generator` of the loader takes precedence over this seed.

    When the training function ends, these settings get their previous values. The generators of
    Python, NumPy, and PyTorch are not reset.

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
    # cuBLAS is deterministic only with this setting. PyTorch raises an error at the first matrix
    # product on CUDA if it is missing.
    if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        set_env("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def current_seed() -> int | None:
    """Return the seed of `enable_reproducibility`; None if it was not called in this attempt."""
    return _seed


def derive_seed(*numbers: int) -> int:
    """Return a hash of numbers, to use as a seed. It has 63 bits, so that it fits an int64."""
    digest = hashlib.blake2b(",".join(map(str, numbers)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _set_seed(seed: int | None) -> None:
    global _seed
    _seed = seed
