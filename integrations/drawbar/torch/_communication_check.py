"""Warn when the ranks of a finished run never communicated, which is rarely intended.

If a model was not wrapped for data-parallel training, each rank trains a separate model on its
shard, without an error. All ways of training together leave a trace: the process group has counted
a collective, another process group exists, or a collective was called through the controller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from drawbar.torch._compat import count_group_activity
from drawbar.train import get_context
from drawbar.train.backend import add_final_notice, count_collectives

_num_excluded_collectives = 0


@contextmanager
def warn_if_no_communication() -> Iterator[None]:
    """Add a notice at the end of the run if the body returns and rank 0 never communicated."""
    global _num_excluded_collectives
    _num_excluded_collectives = 0
    before = _communication_counts()
    yield
    context = get_context()
    is_one_of_many = context.get_world_rank() == 0 and context.get_world_size() > 1
    if is_one_of_many and before is not None and _communication_counts() == before:
        add_final_notice(
            f"The {context.get_world_size()} workers never communicated: no model was wrapped for "
            "data-parallel training and no collective was called. To train one model, call "
            "drawbar.torch.prepare_model(model); ignore this if the workers are independent."
        )


@contextmanager
def exclude_from_communication_check() -> Iterator[None]:
    """Exclude collectives in the body, such as the broadcast of a data loader's seed."""
    global _num_excluded_collectives
    before = count_collectives()
    yield
    _num_excluded_collectives += count_collectives() - before


def _communication_counts() -> tuple[int, int, int] | None:
    """Count the collectives and process groups of this rank; None if torch does not count them."""
    if not dist.is_initialized():
        return None
    activity = count_group_activity()
    if activity is None:
        return None
    return *activity, count_collectives() - _num_excluded_collectives
