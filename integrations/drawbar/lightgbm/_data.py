"""A worker's part of a dataset to a LightGBM `Dataset`, block by block.

LightGBM bins each feature before it trains. Left to itself, a group of workers shares the features
out and each bins its own from a sample of its own rows, so that the model depends on which rows lie
where. Here rank 0 bins all features from a sample of all rows, as one process does, and the others
take its bins. Up to `bin_construct_sample_cnt` rows (200,000 by default) the sample is everything;
beyond, it is chosen by row numbers in the whole dataset, so that it does not depend on the number
of workers either.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lightgbm import Booster, Dataset

from drawbar._boosting import Block, Shard, worker_threads
from drawbar.lightgbm import _c_api
from drawbar.lightgbm._parameters import find_alias, get_parameter
from drawbar.train import collective, get_context
from drawbar.train.backend import get_worker_address

FloatArray = npt.NDArray[np.floating[Any]]
Float64Array = npt.NDArray[np.float64]


def compute_shared_bins(shard: Shard, params: Mapping[str, object]) -> bytes:
    """Give the bins of all features, the same on every rank. A collective.

    Args:
        shard: The training data.
        params: LightGBM's parameters.

    Raises:
        LightGBMError: A parameter is wrong.
    """
    sample = _gather_sample(shard, params)
    if sample is None:
        return collective.broadcast_from_rank_zero(b"")
    with ThreadPoolExecutor(1) as without_network:  # it belongs to this thread
        bins = without_network.submit(
            _c_api.compute_bins,
            sample,
            shard.num_total_rows,
            {**dataset_params(shard, params), **_node_threads(params)},
        ).result()
    return collective.broadcast_from_rank_zero(bins)


def _node_threads(params: Mapping[str, object]) -> dict[str, int]:
    """Give rank 0 the threads of its neighbours too, who wait for it."""
    own = int(get_parameter(params, "num_threads", worker_threads()))
    threads = max(own, 1) * get_context().get_local_world_size()
    return {str(find_alias(params, "num_threads") or "num_threads"): threads}


def dataset_params(shard: Shard, params: Mapping[str, object]) -> dict[str, object]:
    """Give a booster's parameters with the numbers of the features that are categorical."""
    categorical = [
        number for number, feature in enumerate(shard.schema.features) if feature.categories
    ]
    plain = {name: value for name, value in params.items() if not callable(value)}
    return {**plain, "categorical_feature": categorical} if categorical else plain


def make_dataset(
    shard: Shard, bins: bytes, params: Mapping[str, object], earlier: Booster | None = None
) -> Dataset:
    """Make a LightGBM dataset of a shard, whose rows are never together in one array.

    Args:
        shard: The rows.
        bins: From `compute_shared_bins`.
        params: LightGBM's parameters.
        earlier: A booster whose predictions the rows start from.
    """
    blocks = shard.list_blocks()
    alike = _unify_dtypes(blocks)
    batches = [pa.record_batch(block.to_arrow(), shard.schema.names) for block in alike]
    dataset = _c_api.create_dataset(bins, batches, dataset_params(shard, params))
    dataset.pandas_categorical = [
        list(feature.categories or ())
        for feature in shard.schema.features
        if feature.has_named_categories
    ]
    labels, weights, groups, starts = [], [], [], []
    for block in blocks:
        labels.append(block.label)
        if block.weight is not None:
            weights.append(block.weight)
        if block.group is not None:
            groups.append(np.unique(block.group, return_counts=True)[1])
        if earlier is not None or block.base_margin is not None:
            starts.append(_initial_scores(block, earlier, params))
    dataset.set_label(np.concatenate(labels))
    if weights:
        dataset.set_weight(np.concatenate(weights))
    if groups:
        dataset.set_group(np.concatenate(groups))
    if starts:
        dataset.set_init_score(np.concatenate(starts))
    return dataset


def _unify_dtypes(blocks: Sequence[Block]) -> list[Block]:
    """Give blocks in which each feature is float64 if it is in any: LightGBM is told one type."""
    doubles = {
        number
        for block in blocks
        for number, column in enumerate(block.features)
        if column.dtype == np.float64
    }
    return [
        replace(
            block,
            features=tuple(
                column.astype(np.float64, copy=False) if number in doubles else column
                for number, column in enumerate(block.features)
            ),
        )
        for block in blocks
    ]


def _initial_scores(block: Block, earlier: Booster | None, params: Mapping[str, object]) -> Any:
    """Give the score that each row starts from."""
    margin = block.base_margin
    if margin is not None and margin.shape[1] == 1:
        margin = margin[:, 0]
    if earlier is None:
        return margin
    # It sets the number of threads of the whole process. With another one than it was made for, a
    # booster writes beyond its buffers.
    threads = get_parameter(params, "num_threads", worker_threads())
    predicted = earlier.predict(
        block.to_numpy(), raw_score=True, num_iteration=-1, num_threads=threads
    )
    return predicted if margin is None else np.asarray(predicted) + margin


def _gather_sample(shard: Shard, params: Mapping[str, object]) -> Float64Array | None:
    """Give rank 0 the sampled rows of all ranks in rank order, the others None. A collective.

    They go straight to rank 0, block by block, since a sample is too large for Drawbar's own
    channel; and they lie there as LightGBM takes them, features by rows.
    """
    context = get_context()
    chosen = _sample_row_numbers(shard.num_total_rows, params)
    firsts = np.cumsum([0, *collective.all_gather(shard.num_rows)])  # each rank's first row
    chunks = _iter_sampled_rows(shard, chosen - firsts[context.get_world_rank()])
    if context.get_world_rank() > 0:
        address, key = collective.broadcast_from_rank_zero(("", b""))
        with Client(address, authkey=key) as connection:
            connection.send(context.get_world_rank())
            for piece in chunks:
                connection.send(piece.dtype.str)
                connection.send_bytes(piece.reshape(-1).view(np.uint8).data)
        return None
    sample = np.empty((len(shard.schema.features), len(chosen)))
    borders = np.searchsorted(chosen, firsts)  # of the ranks, in the sample
    rank_columns = [sample[:, begin:end] for begin, end in itertools.pairwise(borders)]
    key = secrets.token_bytes(32)
    with (
        ThreadPoolExecutor(1) as meanwhile,
        Listener(
            (get_worker_address(), 0), backlog=context.get_world_size(), authkey=key
        ) as listener,
    ):
        collective.broadcast_from_rank_zero((listener.address, key))
        own = meanwhile.submit(_copy_chunks, rank_columns[0], chunks)
        for _ in range(1, context.get_world_size()):
            with listener.accept() as connection:
                rank = connection.recv()
                _copy_chunks(rank_columns[rank], _receive_chunks(connection, len(sample)))
        own.result()
    return sample


def _copy_chunks(part: Float64Array, chunks: Iterator[FloatArray]) -> None:
    """Put pieces side by side until a part of the sample is full."""
    start = 0
    while start < part.shape[1]:
        piece = next(chunks)
        part[:, start : start + piece.shape[1]] = piece
        start += piece.shape[1]


def _receive_chunks(connection: Connection[str, str], features: int) -> Iterator[FloatArray]:
    while True:
        kind = np.dtype(connection.recv())
        yield np.frombuffer(connection.recv_bytes(), dtype=kind).reshape(features, -1)


def _iter_sampled_rows(shard: Shard, chosen: npt.NDArray[np.int64]) -> Iterator[FloatArray]:
    """Give the rows of a shard that have the chosen numbers, block by block, features by rows."""
    start = 0
    for block in shard if shard.num_rows else ():
        here = chosen[(chosen >= start) & (chosen < start + len(block))] - start
        if len(here):
            yield np.stack([column[here] for column in block.features])
        start += len(block)


def _sample_row_numbers(rows: int, params: Mapping[str, object]) -> npt.NDArray[np.int64]:
    """Give the numbers of the rows that are sampled, ascending."""
    count = int(get_parameter(params, "bin_construct_sample_cnt", 200_000))
    if rows <= count:
        return np.arange(rows)
    seed = int(get_parameter(params, "data_random_seed", 1))
    return np.sort(np.random.default_rng(seed).choice(rows, count, replace=False))
