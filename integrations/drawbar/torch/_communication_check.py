"""Says at the end that the ranks had nothing to do with each other, which is rarely meant.

A model that nobody made data-parallel is trained by each rank on its own part of the data, without
an error. Every way of training together leaves a trace: the process group has numbered a
collective, or there is another group, or the ranks have met through the controller.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from drawbar.train import get_context
from drawbar.train.backend import add_final_notice, count_collectives

_num_excluded_collectives = 0


@contextmanager
def warn_if_no_communication() -> Iterator[None]:
    """Have the run say at its end if the function inside returns and rank 0 has met no other."""
    global _num_excluded_collectives
    _num_excluded_collectives = 0
    before = _communication_counts()
    yield
    context = get_context()
    is_one_of_many = context.get_world_rank() == 0 and context.get_world_size() > 1
    if is_one_of_many and before is not None and _communication_counts() == before:
        add_final_notice(
            f"the {context.get_world_size()} workers have not exchanged anything: no model was "
            "made data-parallel and no collective called. If they train one model, wrap it: "
            "drawbar.torch.prepare_model(model); if each works for itself, all is well"
        )


@contextmanager
def exclude_from_communication_check() -> Iterator[None]:
    """Do not count what the ranks exchange inside: a data loader's seed trains no model."""
    global _num_excluded_collectives
    before = count_collectives()
    yield
    _num_excluded_collectives += count_collectives() - before


def _communication_counts() -> tuple[int, int, int] | None:
    """Count what the rank has done together with others; None where torch does not count it."""
    if not dist.is_initialized():
        return None
    group: Any = dist.group.WORLD  # torch's own stubs lack what is asked of it
    try:
        numbered = int(group._get_sequence_number_for_group())
    except (AttributeError, RuntimeError):  # not every backend numbers its collectives
        return None
    groups = len(dist.distributed_c10d._world.pg_map)
    return numbered, groups, count_collectives() - _num_excluded_collectives
