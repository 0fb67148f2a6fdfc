"""Build XGBoost matrices from a shard, block by block."""

from __future__ import annotations

import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from xgboost import DataIter, DMatrix, ExtMemQuantileDMatrix, QuantileDMatrix

from drawbar._boosting.block import Block, slice_block
from drawbar._boosting.shard import Shard

if TYPE_CHECKING:
    import pandas as pd


def build_quantile_matrix(
    shard: Shard,
    *,
    drop_zero_weights: bool = False,
    reference: DMatrix | None = None,
    max_bin: int | None = None,
    nthread: int | None = None,
    external_memory: bool = False,
    folder: Path | None = None,
) -> DMatrix:
    """Build the matrix of a shard, with one byte per value if `max_bin` is at most 256.

    Collective: the ranks compute the bins together.

    Args:
        shard: Rows of this rank. They are read four times.
        drop_zero_weights: Whether to leave out rows of weight 0.
        reference: Training matrix, whose bins are used for matrices to evaluate.
        max_bin: Bins per feature. Must equal the training parameter.
        nthread: Number of threads.
        external_memory: Whether to store the matrix on disk. Only the current page is in memory.
        folder: Parent of the directory for the files. Default: the system's temporary directory.
    """
    options: dict[str, Any] = {
        "ref": reference,
        "max_bin": max_bin,
        "nthread": nthread,
        "enable_categorical": True,
    }
    if not external_memory:
        return QuantileDMatrix(_ShardIterator(shard, drop_zero_weights), **options)
    cache = tempfile.mkdtemp(prefix="drawbar-xgboost-", dir=folder)
    rows = _ShardIterator(shard, drop_zero_weights, f"{cache}/pages")
    matrix = ExtMemQuantileDMatrix(rows, **options)
    finalizer = weakref.finalize(matrix, shutil.rmtree, cache, ignore_errors=True)
    finalizer.atexit = False  # XGBoost deletes the files at exit and warns if they are missing
    return matrix


class _ShardIterator(DataIter):
    """XGBoost iterator over the blocks of a shard, for any number of passes."""

    def __init__(
        self, shard: Shard, drop_zero_weights: bool, cache_prefix: str | None = None
    ) -> None:
        self._shard = shard
        self._drop_zero_weights = drop_zero_weights
        self._blocks: Iterator[Block] = iter(())
        self._categories = {
            feature.name: list(feature.categories)
            for feature in shard.schema.features
            if feature.categories is not None
        }
        self._by_name = any(feature.has_named_categories for feature in shard.schema.features)
        super().__init__(cache_prefix=cache_prefix)

    def reset(self) -> None:
        """Start a new pass."""
        self._blocks = iter(self._shard)

    def next(self, input_data: Callable[..., None]) -> bool:
        """Pass the next block to XGBoost. Return whether there was one."""
        block = next(self._blocks, None)
        if block is None:
            return False
        if not self._shard.num_rows and block.group is not None:
            # XGBoost divides by the sum of a rank's query weights, and ranks without any.
            block = slice_block(block, slice(0, 0))
        if self._drop_zero_weights and block.weight is not None:
            has_weight = block.weight > 0
            block = block.map(lambda array: array[has_weight])
        input_data(**self._features(block), **_drop_none(_meta_info(block)))
        return True

    def _features(self, block: Block) -> Mapping[str, object]:
        names = self._shard.schema.names
        if self._by_name:
            return {"data": self._to_pandas(block)}
        # XGBoost reads columns about 17 % faster than an array of rows.
        types = ["c" if name in self._categories else "q" for name in names]
        return {
            "data": pa.table(block.to_arrow(), names),
            "feature_names": names,
            "feature_types": types,
        }

    def _to_pandas(self, block: Block) -> pd.DataFrame:
        """Convert a block to a DataFrame with named categories, which XGBoost stores in the model.

        Arrow's categories could not be integers.
        """
        import pandas as pd  # takes 0.2 s, and only few shards need it

        columns = dict(zip(self._shard.schema.names, block.features, strict=True))
        for name, categories in self._categories.items():
            codes = np.where(np.isnan(columns[name]), -1, columns[name]).astype(np.int32)
            columns[name] = pd.Categorical.from_codes(codes, categories)
        return pd.DataFrame(columns, copy=False)


def _meta_info(block: Block) -> dict[str, object]:
    weight, group, margin = block.weight, block.group, block.base_margin
    if weight is not None and group is not None:
        weight = weight[np.diff(group, prepend=-1) != 0]  # one weight per query
    if margin is not None and np.isnan(margin).all():
        margin = None  # this dataset has no margins: use XGBoost's default
    elif margin is not None and margin.shape[1] == 1:
        margin = margin[:, 0]
    return {"label": block.label, "weight": weight, "qid": group, "base_margin": margin}


def _drop_none(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}
