"""Build LightGBM datasets from shards, with bins shared by all ranks.

LightGBM bins features before it trains. By default, each worker bins some of the features from a
sample of its own rows, so that the model depends on the distribution of rows. Here, rank 0 bins all
features from a sample of all rows, like a single process, and sends the bins to the others. Up to
`bin_construct_sample_cnt` rows (default: 200,000), all rows are used. Beyond that, rows are sampled
by their numbers in the dataset, so that the sample does not depend on the number of workers.
"""

from __future__ import annotations

import itertools
import secrets
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Client, Connection, Listener
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lightgbm import Booster, Dataset

from drawbar._boosting.block import Block
from drawbar._boosting.shard import Shard
from drawbar._boosting.threads import worker_threads
from drawbar.lightgbm import _c_api
from drawbar.lightgbm._parameters import find_alias, get_parameter
from drawbar.train import collective, get_context
from drawbar.train.backend import get_worker_address

FloatArray = npt.NDArray[np.floating[Any]]
Float64Array = npt.NDArray[np.float64]


def compute_shared_bins(shard: Shard, params: Mapping[str, object]) -> bytes:
    """Return the bins of all features, the same on every rank. Collective.

    Args:
        shard: Training data.
        params: LightGBM's parameters.

    Raises:
        LightGBMError: A parameter is invalid.
    """
    sample = _gather_sample(shard, params)
    if sample is None:
        return collective.broadcast_from_rank_zero(b"")
    with ThreadPoolExecutor(1) as without_network:  # the network belongs to this thread
        bins = without_network.submit(
            _c_api.compute_bins,
            sample,
            shard.num_total_rows,
            {**dataset_params(shard, params), **_node_threads(params)},
        ).result()
    return collective.broadcast_from_rank_zero(bins)


def _node_threads(params: Mapping[str, object]) -> dict[str, int]:
    """Return the number of threads of all workers on the node, since the others wait for rank 0."""
    worker_count = int(get_parameter(params, "num_threads", worker_threads()))
    threads = max(worker_count, 1) * get_context().get_local_world_size()
    return {str(find_alias(params, "num_threads") or "num_threads"): threads}


def dataset_params(shard: Shard, params: Mapping[str, object]) -> dict[str, object]:
    """Add the numbers of the categorical features to a booster's parameters."""
    categorical = [
        number for number, feature in enumerate(shard.schema.features) if feature.categories
    ]
    plain = {  # a callable is a custom objective, which LightGBM calls "none"
        name: "none" if callable(value) else value for name, value in params.items()
    }
    return {**plain, "categorical_feature": categorical} if categorical else plain


def make_dataset(
    shard: Shard,
    bins: bytes,
    params: Mapping[str, object],
    earlier: Booster | None = None,
    start_score: float | None = None,
) -> Dataset:
    """Build a LightGBM dataset from a shard without copying all rows to one array.

    Args:
        shard: Rows of this rank.
        bins: Result of `compute_shared_bins`.
        params: LightGBM's parameters.
        earlier: Booster whose predictions are the initial scores.
        start_score: Initial score of every row, without `earlier` and base margins.
    """
    blocks = shard.list_blocks()
    tables = [pa.table(block.to_arrow(), shard.schema.names) for block in blocks]
    # LightGBM needs one type: features that are float64 in one block become float64 in all.
    batches = pa.concat_tables(tables, promote_options="permissive").to_batches()
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
        elif start_score is not None:
            starts.append(np.full(len(block), start_score))
    dataset.set_label(np.concatenate(labels))
    if weights:
        dataset.set_weight(np.concatenate(weights))
    if groups:
        dataset.set_group(np.concatenate(groups))
    if starts:
        dataset.set_init_score(np.concatenate(starts))
    return dataset


def _initial_scores(block: Block, earlier: Booster | None, params: Mapping[str, object]) -> Any:
    """Return the initial score of each row."""
    margin = block.base_margin
    if margin is not None and margin.shape[1] == 1:
        margin = margin[:, 0]
    if earlier is None:
        return margin
    # predict() sets the number of threads of the whole process. If it differs from the number with
    # which a booster was created, that booster writes beyond its buffers.
    threads = get_parameter(params, "num_threads", worker_threads())
    predicted = earlier.predict(
        block.to_numpy(), raw_score=True, num_iteration=-1, num_threads=threads
    )
    return predicted if margin is None else np.asarray(predicted) + margin


def _gather_sample(shard: Shard, params: Mapping[str, object]) -> Float64Array | None:
    """Return the sampled rows of all ranks in rank order on rank 0, else None. Collective.

    The rows are sent directly to rank 0, block by block, because a sample is too large for
    Drawbar's collectives. They are stored in LightGBM's layout (features, rows).
    """
    context = get_context()
    chosen = _sample_row_numbers(shard.num_total_rows, params)
    firsts = np.cumsum([0, *collective.all_gather(shard.num_rows)])  # each rank's first row
    chunks = _iter_sampled_rows(shard, chosen - firsts[context.get_world_rank()])
    if context.get_world_rank() > 0:
        address, key = collective.broadcast_from_rank_zero(("", b""))
        with Client(address, authkey=key) as connection:
            connection.send(context.get_world_rank())
            for chunk in chunks:
                connection.send(chunk.dtype.str)
                connection.send_bytes(chunk.reshape(-1).view(np.uint8).data)
        return None
    sample = np.empty((len(shard.schema.features), len(chosen)))
    borders = np.searchsorted(chosen, firsts)  # start of each rank's rows in the sample
    rank_columns = [sample[:, begin:end] for begin, end in itertools.pairwise(borders)]
    key = secrets.token_bytes(32)
    with (
        ThreadPoolExecutor(1) as background,
        Listener(
            (get_worker_address(), 0), backlog=context.get_world_size(), authkey=key
        ) as listener,
    ):
        collective.broadcast_from_rank_zero((listener.address, key))
        local_copy = background.submit(_copy_chunks, rank_columns[0], chunks)
        for _ in range(1, context.get_world_size()):
            with listener.accept() as connection:
                rank = connection.recv()
                _copy_chunks(rank_columns[rank], _receive_chunks(connection, len(sample)))
        local_copy.result()
    return sample


def _copy_chunks(part: Float64Array, chunks: Iterator[FloatArray]) -> None:
    """Copy chunks into a part of the sample until it is full."""
    start = 0
    while start < part.shape[1]:
        chunk = next(chunks)
        part[:, start : start + chunk.shape[1]] = chunk
        start += chunk.shape[1]


def _receive_chunks(connection: Connection[str, str], features: int) -> Iterator[FloatArray]:
    while True:
        kind = np.dtype(connection.recv())
        yield np.frombuffer(connection.recv_bytes(), dtype=kind).reshape(features, -1)


def _iter_sampled_rows(shard: Shard, chosen: npt.NDArray[np.int64]) -> Iterator[FloatArray]:
    """Yield the chosen rows of a shard, block by block, with shape (features, rows)."""
    start = 0
    for block in shard if shard.num_rows else ():
        in_block = chosen[(chosen >= start) & (chosen < start + len(block))] - start
        if len(in_block):
            yield np.stack([column[in_block] for column in block.features])
        start += len(block)


def _sample_row_numbers(rows: int, params: Mapping[str, object]) -> npt.NDArray[np.int64]:
    """Return the numbers of the sampled rows in ascending order."""
    count = int(get_parameter(params, "bin_construct_sample_cnt", 200_000))
    if rows <= count:
        return np.arange(rows)
    seed = int(get_parameter(params, "data_random_seed", 1))
    return np.sort(np.random.default_rng(seed).choice(rows, count, replace=False))
