"""Sums over the ranks, by the collectives of Keras's backend."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from drawbar.train import get_context

Totals = Callable[[Sequence[Any]], list[Any]]
"""Takes one rank's tensors and gives, in their order, the sums over all ranks."""

_GROUP_KEY = 20_000  # of TensorFlow's strategies, which count from 1, none comes so far
_instances = itertools.count(20_000)


def totals_of(backend: str) -> Totals:
    """Give how ranks sum tensors up; every rank must call it for the same ones in one order."""
    return {"torch": _torch, "tensorflow": _tensorflow}[backend]


def _torch(tensors: Sequence[Any]) -> list[Any]:
    import torch
    import torch.distributed as dist

    def total(flat: Any) -> Any:
        dist.all_reduce(flat)
        return flat

    def concatenate(parts: list[Any]) -> Any:
        return torch.cat([part.detach().reshape(-1) for part in parts])

    return _by_type(tensors, concatenate, total, torch.reshape)


def _tensorflow(tensors: Sequence[Any]) -> list[Any]:
    import tensorflow as tf

    def total(flat: Any) -> Any:
        return tf.raw_ops.CollectiveReduceV2(
            input=flat,
            group_size=get_context().get_world_size(),
            group_key=_GROUP_KEY,
            instance_key=next(_instances),
            ordering_token=[],
            merge_op="Add",
            final_op="Id",
            communication_hint="NCCL" if tf.config.list_logical_devices("GPU") else "RING",
        )

    def concatenate(parts: list[Any]) -> Any:
        return tf.concat([tf.reshape(part, [-1]) for part in parts], 0)

    return _by_type(
        [tf.convert_to_tensor(each) for each in tensors], concatenate, total, tf.reshape
    )


def _by_type(
    tensors: Sequence[Any],
    concatenate: Callable[[list[Any]], Any],
    total: Callable[[Any], Any],
    reshape: Callable[[Any, Any], Any],
) -> list[Any]:
    """Sum up all tensors of one type at once."""
    sums: dict[int, Any] = {}
    for kind in dict.fromkeys(each.dtype for each in tensors):
        chosen = [number for number, each in enumerate(tensors) if each.dtype == kind]
        flat, begin = total(concatenate([tensors[number] for number in chosen])), 0
        for number in chosen:
            end = begin + math.prod(map(int, tensors[number].shape))
            sums[number] = reshape(flat[begin:end], tensors[number].shape)
            begin = end
    return [sums[number] for number in range(len(tensors))]
