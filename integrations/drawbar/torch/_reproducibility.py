"""Seeds: the same order, the same weights, the same augmentations again.

Everything random in a run comes from few numbers: the user's seed, the epoch, the rank.
`derive_seed` mixes them, so that no two streams of random numbers are alike by accident.
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
    """Make a training function give the same numbers when it runs again, on the same hardware and
    world size.

    Call it first in the training function. It seeds Python's `random`, NumPy and PyTorch (all
    devices), alike on every rank, so that all ranks build the same model; switches cuDNN's choice
    of kernels by timing off; and has PyTorch use deterministic algorithms, or raise where it has
    none (https://docs.pytorch.org/docs/stable/notes/randomness.html). `prepare_data_loader` then
    orders the data by this seed and seeds the processes of the loader by the seed and the rank.
    Deterministic algorithms can be slower. The training function's end puts all settings back.

    Args:
        seed: Any number from 0 to 2**32 - 1.

    Raises:
        ValueError: The seed is out of range.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"the seed must be from 0 to 2**32 - 1, found {seed}")
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
    # Without it torch raises at the first matrix product on CUDA.
    if "CUBLAS_WORKSPACE_CONFIG" not in os.environ:
        set_env("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def current_seed() -> int | None:
    """Give the seed of `enable_reproducibility`, None if it was not called in this attempt."""
    return _seed


def derive_seed(*parts: int) -> int:
    """Mix numbers into a seed of 63 bits; any change of a part changes it thoroughly."""
    digest = hashlib.blake2b(",".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _set_seed(seed: int | None) -> None:
    global _seed
    _seed = seed
