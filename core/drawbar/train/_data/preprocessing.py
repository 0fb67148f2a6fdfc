"""A preprocessor of Ray Data's: fitted on what is trained on, and applied to all."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from drawbar.train._config.data_config import TRAIN_DATASET_KEY
from drawbar.train._data import split
from drawbar.train._data.map_style import is_map_style

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import Dataset
    from ray.data.preprocessor import Preprocessor


def is_fitted(preprocessor: Preprocessor) -> bool:
    """Whether a preprocessor is fitted, or needs not be."""
    from ray.data.preprocessor import Preprocessor

    statuses = Preprocessor.FitStatus
    return preprocessor.fit_status() in (statuses.FITTED, statuses.NOT_FITTABLE)


def fit_preprocessor(preprocessor: Preprocessor, datasets: Mapping[str, object]) -> Preprocessor:
    """Give a preprocessor that is fitted on the training data; one that is fitted already as it is.

    Raises:
        ValueError: It is to be fitted, and there is no dataset to train on.
    """
    if is_fitted(preprocessor):
        return preprocessor
    if TRAIN_DATASET_KEY not in datasets:
        raise ValueError(
            f"DataConfig.preprocessor is fitted on datasets[{TRAIN_DATASET_KEY!r}], but the "
            f"datasets are {', '.join(map(repr, datasets)) or 'none'}; fit it before"
        )
    train = {TRAIN_DATASET_KEY: datasets[TRAIN_DATASET_KEY]}
    dataset = split.to_ray_datasets(split.make_datasets(train))[TRAIN_DATASET_KEY]
    return copy.deepcopy(preprocessor).fit(dataset)


def apply_preprocessor(
    preprocessor: Preprocessor, datasets: Mapping[str, object]
) -> dict[str, object]:
    """Give the datasets as the preprocessor leaves them; functions, when they are called."""
    return {
        name: partial(_make_and_transform, preprocessor, name, each)
        if callable(each)
        else _transform(preprocessor, each)
        for name, each in datasets.items()
    }


def _make_and_transform(preprocessor: Preprocessor, name: str, make: object) -> Dataset | pa.Table:
    return _transform(preprocessor, split.make_datasets({name: make})[name])


def _transform(preprocessor: Preprocessor, dataset: Any) -> Dataset | pa.Table:
    """Transform a table here and now, and a dataset of Ray Data's when it is read."""
    if hasattr(dataset, "streaming_split"):
        return preprocessor.transform(dataset)
    if is_map_style(dataset):
        raise TypeError(
            f"DataConfig.preprocessor transforms columns, and a {type(dataset).__name__} of "
            "PyTorch's has items; give it as ray.data.from_torch(...)"
        )
    from ray.data.block import BlockAccessor

    batch = preprocessor.transform_batch(dataset.to_pandas())
    table: pa.Table = BlockAccessor.for_block(BlockAccessor.batch_to_block(batch)).to_arrow()
    return table
