"""A shard to XGBoost's matrices, block by block."""

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

from drawbar._boosting import Block, Shard

if TYPE_CHECKING:
    import pandas as pd


def build_quantile_matrix(
    shard: Shard,
    *,
    reference: DMatrix | None = None,
    max_bin: int | None = None,
    nthread: int | None = None,
    external_memory: bool = False,
    folder: Path | None = None,
) -> DMatrix:
    """Make the matrix of a shard: one byte per value if `max_bin` is 256 or less.

    A collective: the ranks find the bins together.

    Args:
        shard: This rank's rows, gone through four times.
        reference: The training matrix, whose bins the matrices to evaluate share.
        max_bin: Bins per feature; must be that of the parameters.
        nthread: Threads to use.
        external_memory: Keep the matrix on disk; only the page in use is in memory.
        folder: Where the files' own folder is made. Default: the system's folder for such.
    """
    options: dict[str, Any] = {
        "ref": reference,
        "max_bin": max_bin,
        "nthread": nthread,
        "enable_categorical": True,
    }
    if not external_memory:
        return QuantileDMatrix(_ShardIterator(shard), **options)
    cache = tempfile.mkdtemp(prefix="drawbar-xgboost-", dir=folder)
    matrix = ExtMemQuantileDMatrix(_ShardIterator(shard, f"{cache}/pages"), **options)
    finalizer = weakref.finalize(matrix, shutil.rmtree, cache, ignore_errors=True)
    finalizer.atexit = False  # XGBoost itself removes the files then, and warns if they are missing
    return matrix


class _ShardIterator(DataIter):
    """Gives a shard's blocks to XGBoost, in as many passes as it likes."""

    def __init__(self, shard: Shard, cache_prefix: str | None = None) -> None:
        self._shard = shard
        self._blocks: Iterator[Block] = iter(())
        self._categories = {
            feature.name: list(feature.categories)
            for feature in shard.schema.features
            if feature.categories is not None
        }
        self._by_name = any(feature.has_named_categories for feature in shard.schema.features)
        super().__init__(cache_prefix=cache_prefix)

    def reset(self) -> None:
        """Begin a new pass."""
        self._blocks = iter(self._shard)

    def next(self, input_data: Callable[..., None]) -> bool:
        """Give the next block; says whether there was one."""
        block = next(self._blocks, None)
        if block is None:
            return False
        input_data(**self._features(block), **_drop_none(_meta_info(block)))
        return True

    def _features(self, block: Block) -> Mapping[str, object]:
        names = self._shard.schema.names
        if self._by_name:
            return {"data": self._to_pandas(block)}
        # XGBoost reads columns a sixth faster than an array of rows.
        types = ["c" if name in self._categories else "q" for name in names]
        return {
            "data": pa.table(block.to_arrow(), names),
            "feature_names": names,
            "feature_types": types,
        }

    def _to_pandas(self, block: Block) -> pd.DataFrame:
        """Give columns with named categories, which a frame carries into the model.

        Arrow's could not be integers.
        """
        import pandas as pd  # takes 0.2 s, for what few shards need

        columns = dict(zip(self._shard.schema.names, block.features, strict=True))
        for name, categories in self._categories.items():
            codes = np.where(np.isnan(columns[name]), -1, columns[name]).astype(np.int32)
            columns[name] = pd.Categorical.from_codes(codes, categories)
        return pd.DataFrame(columns, copy=False)


def _meta_info(block: Block) -> dict[str, object]:
    weight, group, margin = block.weight, block.group, block.base_margin
    if weight is not None and group is not None:
        weight = weight[np.append(True, group[1:] != group[:-1])]  # XGBoost weighs whole queries
    if margin is not None and np.isnan(margin).all():
        margin = None  # of a data set without, beside one with: XGBoost begins where it likes
    elif margin is not None and margin.shape[1] == 1:
        margin = margin[:, 0]
    return {"label": block.label, "weight": weight, "qid": group, "base_margin": margin}


def _drop_none(values: Mapping[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}
