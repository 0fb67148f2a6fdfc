"""Sum tensors and gather rows across ranks with the backend's collectives."""

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
    """Function that takes the tensors of one rank and returns their sums over all ranks.

    If `weight` is set, it returns means weighted by the `weight` of each rank. Tensors of ranks
    with weight 0 are ignored, even if they contain NaN.
    """

    def __call__(self, tensors: Sequence[Tensor], weight: Any = None) -> list[Tensor]: ...


_GROUP_KEY = 20_000  # TensorFlow's strategies count from 1 and do not reach this key
_instances = itertools.count(20_000)
_IN_GRAPHS = 1 << 30  # first key for collectives in graphs


def make_allreduce(backend: str) -> AllReduce:
    """Create the all-reduce function of a backend.

    All ranks must call this function in the same order, and also the returned function, with the
    same kinds of tensors.
    """
    return _torch_allreduce if backend == "torch" else _TensorFlowAllReduce()


def to_numpy(tensor: Any) -> Any:
    """Convert a backend's tensor to a NumPy array."""
    import numpy as np

    host_tensor = tensor.detach().cpu() if hasattr(tensor, "detach") else tensor
    return host_tensor.numpy() if hasattr(host_tensor, "numpy") else np.asarray(host_tensor)


def all_gather_rows(rows: Any) -> Any:
    """Concatenate the rows of all ranks, rank 0's first. Takes and returns a NumPy array."""
    import numpy as np

    counts = collective.all_gather(len(rows))
    rank, backend = get_context().get_world_rank(), current_keras_backend()
    if backend == "jax":
        from jax.experimental.multihost_utils import process_allgather

        padded = np.zeros((max(counts), *rows.shape[1:]), rows.dtype)
        padded[: len(rows)] = rows
        pairs = zip(process_allgather(padded), counts, strict=True)
        return np.concatenate([np.asarray(part)[:count] for part, count in pairs])
    from keras.ops import convert_to_tensor

    all_rows = np.zeros((sum(counts), *rows.shape[1:]), rows.dtype)
    all_rows[sum(counts[:rank]) :][: len(rows)] = rows
    (summed,) = make_allreduce(backend)([convert_to_tensor(all_rows)])
    return to_numpy(summed)


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
        chunks = flat[: sum(sizes)].split(sizes)
        return [chunk.reshape(part.shape) for chunk, part in zip(chunks, parts, strict=True)]

    return _reduce_by_dtype(tensors, concatenate, reduce, split)


class _TensorFlowAllReduce:
    """All-reduce for TensorFlow; see `AllReduce`.

    Collectives of the ranks are matched by keys. In a graph, the key is derived from the traced
    function and the number of preceding collectives in it, because a single rank may trace the
    function again, for example for a batch of another shape.
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
            # Some shapes are unknown while a graph is traced.
            sizes = tf.stack([tf.size(part) for part in parts])
            chunks = tf.split(flat[: tf.reduce_sum(sizes)], sizes, num=len(parts))
            return [
                tf.ensure_shape(tf.reshape(chunk, tf.shape(part)), part.shape)
                for chunk, part in zip(chunks, parts, strict=True)
            ]

        converted = [tf.convert_to_tensor(tensor) for tensor in tensors]
        return _reduce_by_dtype(converted, concatenate, reduce, split)

    def _next_key(self) -> int:
        import tensorflow as tf

        if tf.executing_eagerly():
            return next(_instances)
        graph = tf.compat.v1.get_default_graph()
        while type(graph).__name__ != "FuncGraph" and hasattr(graph, "outer_graph"):
            graph = graph.outer_graph  # from a branch or loop to the function that contains it
        count = self._in_graphs.setdefault(graph, itertools.count())
        key = f"{self._number} {getattr(graph, 'name', '')} {next(count)}"
        return _IN_GRAPHS | (zlib.crc32(key.encode()) >> 2)


def _reduce_by_dtype(
    tensors: Sequence[Tensor],
    concatenate: Callable[[list[Tensor]], Tensor],
    reduce: Callable[[Tensor], Tensor],
    split: Callable[[Tensor, list[Tensor]], list[Tensor]],
) -> list[Tensor]:
    """Reduce all tensors of the same dtype with one collective."""
    sums: dict[int, Tensor] = {}
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        indices = [index for index, tensor in enumerate(tensors) if tensor.dtype == dtype]
        parts = [tensors[index] for index in indices]
        sums |= zip(indices, split(reduce(concatenate(parts)), parts), strict=True)
    return [sums[index] for index in range(len(tensors))]
