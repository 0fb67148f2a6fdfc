"""Sums over the ranks and rows of all of them, by the collectives of Keras's backend."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

from drawbar.keras._backend import current_keras_backend
from drawbar.keras._types import Tensor
from drawbar.train import collective, get_context


class AllReduce(Protocol):
    """Takes one rank's tensors and gives, in their order, the sums over all ranks.

    If they are given a weight of this rank's, the means by those weights; with a weight of 0 what
    is no number does no harm.
    """

    def __call__(self, tensors: Sequence[Tensor], weight: Any = None) -> list[Tensor]: ...


_GROUP_KEY = 20_000  # of TensorFlow's strategies, which count from 1, none comes so far
_instances = itertools.count(20_000)
_IN_GRAPHS = 1 << 30  # the keys from here on


def make_allreduce(backend: str) -> AllReduce:
    """Give how ranks sum tensors up; every rank must call it for the same ones in one order.

    Every rank must also call this in the same order.
    """
    return _torch_allreduce if backend == "torch" else _TensorFlowAllReduce()


def to_numpy(tensor: Any) -> Any:
    """Give a backend's tensor as a NumPy array."""
    import numpy as np

    on_host = tensor.detach().cpu() if hasattr(tensor, "detach") else tensor
    return on_host.numpy() if hasattr(on_host, "numpy") else np.asarray(on_host)


def all_gather_rows(own: Any) -> Any:
    """Put the rows of all ranks together, rank 0's first. Takes and gives a NumPy array."""
    import numpy as np

    counts = collective.all_gather(len(own))
    rank, backend = get_context().get_world_rank(), current_keras_backend()
    if backend == "jax":
        from jax.experimental.multihost_utils import process_allgather

        padded = np.zeros((max(counts), *own.shape[1:]), own.dtype)
        padded[: len(own)] = own
        pairs = zip(process_allgather(padded), counts, strict=True)
        return np.concatenate([np.asarray(part)[:count] for part, count in pairs])
    from keras.ops import convert_to_tensor

    all_rows = np.zeros((sum(counts), *own.shape[1:]), own.dtype)
    all_rows[sum(counts[:rank]) :][: len(own)] = own
    (reduce,) = make_allreduce(backend)([convert_to_tensor(all_rows)])
    return to_numpy(reduce)


def _torch_allreduce(tensors: Sequence[Tensor], weight: Any = None) -> list[Tensor]:
    import torch
    import torch.distributed as dist

    def reduce(flat: Any) -> Any:
        if weight is None:
            dist.all_reduce(flat)
            return flat
        if weight:
            flat.mul_(weight)
        else:
            flat.zero_()
        dist.all_reduce(flat)
        return flat.div_(flat[-1].clone())

    def concatenate(parts: list[Any]) -> Any:
        flat = [part.detach().reshape(-1) for part in parts]
        return torch.cat(flat if weight is None else [*flat, flat[0].new_ones(1)])

    def split(flat: Any, parts: list[Any]) -> list[Any]:
        sizes = [part.numel() for part in parts]
        pieces = flat[: sum(sizes)].split(sizes)
        return [piece.reshape(part.shape) for piece, part in zip(pieces, parts, strict=True)]

    return _reduce_by_dtype(tensors, concatenate, reduce, split)


class _TensorFlowAllReduce:
    """The sums of TensorFlow, as `Totals` says.

    The ranks' sums meet by keys. In a graph the key follows from the function of the user's or of
    Keras's that is traced, and from what it has summed up before: a rank may trace it anew alone,
    say for a batch of another shape.
    """

    def __init__(self) -> None:
        self._number = next(_instances)
        self._in_graphs: WeakKeyDictionary[object, itertools.count[int]] = WeakKeyDictionary()

    def __call__(self, tensors: Sequence[Tensor], weight: Any = None) -> list[Tensor]:
        import tensorflow as tf

        def reduce(flat: Any) -> Any:
            summed = tf.raw_ops.CollectiveReduceV2(
                input=flat
                if weight is None
                else tf.math.multiply_no_nan(flat, tf.cast(weight, flat.dtype)),
                group_size=get_context().get_world_size(),
                group_key=_GROUP_KEY,
                instance_key=self._next_key(),
                ordering_token=[],
                merge_op="Add",
                final_op="Id",
                communication_hint="NCCL" if tf.config.list_logical_devices("GPU") else "RING",
            )
            return summed if weight is None else summed / summed[-1]

        def concatenate(parts: list[Any]) -> Any:
            flat = [tf.reshape(part, [-1]) for part in parts]
            return tf.concat(flat if weight is None else [*flat, tf.ones([1], flat[0].dtype)], 0)

        def split(flat: Any, parts: list[Any]) -> list[Any]:
            # Not every shape is known while a graph is traced.
            sizes = tf.stack([tf.size(part) for part in parts])
            pieces = tf.split(flat[: tf.reduce_sum(sizes)], sizes, num=len(parts))
            return [
                tf.ensure_shape(tf.reshape(piece, tf.shape(part)), part.shape)
                for piece, part in zip(pieces, parts, strict=True)
            ]

        own = [tf.convert_to_tensor(each) for each in tensors]
        return _reduce_by_dtype(own, concatenate, reduce, split)

    def _next_key(self) -> int:
        import tensorflow as tf

        if tf.executing_eagerly():
            return next(_instances)
        graph = tf.compat.v1.get_default_graph()
        while type(graph).__name__ != "FuncGraph" and hasattr(graph, "outer_graph"):
            graph = graph.outer_graph  # from a branch or a loop to the function that it is in
        count = self._in_graphs.setdefault(graph, itertools.count())
        told = f"{self._number} {getattr(graph, 'name', '')} {next(count)}"
        return _IN_GRAPHS | (zlib.crc32(told.encode()) >> 2)


def _reduce_by_dtype(
    tensors: Sequence[Tensor],
    concatenate: Callable[[list[Tensor]], Tensor],
    reduce: Callable[[Tensor], Tensor],
    split: Callable[[Tensor, list[Tensor]], list[Tensor]],
) -> list[Tensor]:
    """Sum up all tensors of one type at once."""
    sums: dict[int, Tensor] = {}
    for kind in dict.fromkeys(each.dtype for each in tensors):
        chosen = [number for number, each in enumerate(tensors) if each.dtype == kind]
        parts = [tensors[number] for number in chosen]
        sums |= zip(chosen, split(reduce(concatenate(parts)), parts), strict=True)
    return [sums[number] for number in range(len(tensors))]
