"""Fit a Ray Data preprocessor and apply it to the datasets."""

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
    """Return whether a preprocessor is fitted or needs no fitting."""
    from ray.data.preprocessor import Preprocessor

    statuses = Preprocessor.FitStatus
    return preprocessor.fit_status() in (statuses.FITTED, statuses.NOT_FITTABLE)


def fit_preprocessor(preprocessor: Preprocessor, datasets: Mapping[str, object]) -> Preprocessor:
    """Return a preprocessor that is fitted on the training dataset.

    Raises:
        ValueError: The preprocessor is not fitted, and there is no training dataset.
    """
    if is_fitted(preprocessor):
        return preprocessor
    if TRAIN_DATASET_KEY not in datasets:
        raise ValueError(
            f"DataConfig.preprocessor must be fitted on datasets[{TRAIN_DATASET_KEY!r}], but the "
            f"trainer's datasets are {', '.join(map(repr, datasets)) or 'none'}. Pass a dataset "
            f"{TRAIN_DATASET_KEY!r}, or fit the preprocessor before you pass it"
        )
    train = {TRAIN_DATASET_KEY: datasets[TRAIN_DATASET_KEY]}
    dataset = split.to_ray_datasets(split.make_datasets(train))[TRAIN_DATASET_KEY]
    return copy.deepcopy(preprocessor).fit(dataset)


def apply_preprocessor(
    preprocessor: Preprocessor, datasets: Mapping[str, object]
) -> dict[str, object]:
    """Return the transformed datasets. Factories return transformed datasets when called."""
    return {
        name: partial(_make_and_transform, preprocessor, name, dataset)
        if callable(dataset)
        else _transform(preprocessor, dataset)
        for name, dataset in datasets.items()
    }


def _make_and_transform(preprocessor: Preprocessor, name: str, make: object) -> Dataset | pa.Table:
    return _transform(preprocessor, split.make_datasets({name: make})[name])


def _transform(preprocessor: Preprocessor, dataset: Any) -> Dataset | pa.Table:
    """Transform a table immediately, and a Ray Data dataset when it is read."""
    if hasattr(dataset, "streaming_split"):
        return preprocessor.transform(dataset)
    if is_map_style(dataset):
        raise TypeError(
            "DataConfig.preprocessor needs a dataset with columns, but "
            f"{type(dataset).__name__} is a PyTorch dataset, which has none. Convert it with "
            "ray.data.from_torch(...)"
        )
    from ray.data.block import BlockAccessor

    batch = preprocessor.transform_batch(dataset.to_pandas())
    table: pa.Table = BlockAccessor.for_block(BlockAccessor.batch_to_block(batch)).to_arrow()
    return table
