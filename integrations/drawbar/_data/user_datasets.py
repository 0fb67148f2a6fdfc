"""Open the datasets of a trainer, and apply its preprocessor.

Tables, Parquet files, and PyTorch map-style datasets are used as they are. Ray Data is imported
only if a dataset needs it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from drawbar._base.frames import warn_caller
from drawbar._base.packages import require_package
from drawbar._data.data_config import DataConfig
from drawbar._data.dictionaries import check_dictionaries, widen_dictionaries
from drawbar._data.parquet_files import read_parquet
from drawbar.train._config.data_source import TRAIN_DATASET_KEY, DataSource

if TYPE_CHECKING:
    import pyarrow as pa
    from ray.data import Dataset
    from ray.data.preprocessor import Preprocessor


def check_datasets(datasets: Mapping[str, object] | DataSource | None, config: DataConfig) -> None:
    """Check the names and types of datasets before anything starts.

    Warns about names in `DataConfig` that no dataset has.

    Raises:
        TypeError: The argument is not a mapping of names to datasets or dataset factories.
        ValueError: A `DataSource` is passed with a `DataConfig`.
        ImportError: Ray is older than 2.54, and a dataset is one of Ray Data.
    """
    if isinstance(datasets, DataSource):
        if config != DataConfig():
            raise ValueError(
                f"dataset_config={config!r} has no effect on a {type(datasets).__name__}, which "
                "splits its data itself. Remove dataset_config"
            )
        return
    if datasets is not None and not isinstance(datasets, Mapping):
        raise TypeError(
            "datasets must be a dict of name to ray.data.Dataset, table or path, such as "
            f"{{'{TRAIN_DATASET_KEY}': frame}}, found {describe_value(datasets)}"
        )
    for name, dataset in (datasets or {}).items():
        if not callable(dataset):
            _check_dataset_type(name, dataset)
    named = set() if config.datasets_to_split == "all" else set(config.datasets_to_split)
    unknown = named - set(datasets or {}) - {TRAIN_DATASET_KEY}
    if unknown:
        warn_caller(
            f"DataConfig.datasets_to_split names {sorted(unknown)}, but datasets has "
            f"{sorted(datasets or {})}: each worker reads all rows of the datasets that are not "
            "split"
        )


def _check_dataset_type(name: str, dataset: object) -> None:
    checks = (is_ray_dataset, is_table, is_path_or_paths, is_map_style)
    if not any(check(dataset) for check in checks):
        raise TypeError(
            f"datasets[{name!r}] must be a ray.data.Dataset, a table (pandas, Arrow, Hugging "
            "Face), the path of Parquet files, a PyTorch map-style dataset, or a function that "
            f"returns one of these, found {describe_value(dataset)}. Create one with "
            "ray.data.from_items, read_csv ..."
        )
    if is_ray_dataset(dataset):
        _require_ray_data()


def _require_ray_data() -> None:
    """Check the version of Ray Data.

    Earlier versions shuffle files in another order after a restart, so that rows would be repeated
    or left out. They also have no API to stop a split.

    Raises:
        ImportError: Ray is older than 2.54.
    """
    require_package("ray", extra="data", min_version="2.54")


def is_ray_dataset(dataset: object) -> bool:
    """Return whether a value is a dataset of Ray Data."""
    return hasattr(dataset, "streaming_split")


def describe_value(value: object) -> str:
    """Return a short description of a value, whose repr may be long."""
    short = repr(value)
    if len(short) <= 80 and "\n" not in short:
        return short
    return f"a {type(value).__module__}.{type(value).__qualname__}"


def open_datasets(datasets: Mapping[str, object]) -> dict[str, object]:
    """Read tables and files. Dataset factories are called later."""
    return {
        name: dataset if callable(dataset) else _open_dataset(name, dataset)
        for name, dataset in datasets.items()
    }


def make_datasets(datasets: Mapping[str, object]) -> dict[str, Any]:
    """Call dataset factories.

    Raises:
        TypeError: A factory returns something else than a dataset.
    """
    return {
        name: _open_dataset(name, dataset()) if callable(dataset) else dataset
        for name, dataset in datasets.items()
    }


def _open_dataset(name: str, dataset: object) -> object:
    _check_dataset_type(name, dataset)
    if is_ray_dataset(dataset) or is_map_style(dataset):
        return dataset
    try:
        table = to_arrow_table(dataset) if is_table(dataset) else read_parquet(dataset)
        if is_ray_dataset(table):
            return table
        check_dictionaries(table.schema)
        is_chunked = any(column.num_chunks > 1 for column in table.columns)
        return widen_dictionaries(table) if is_chunked else table
    except FileNotFoundError as error:
        raise FileNotFoundError(f"datasets[{name!r}]: {error}") from error
    except OSError as error:
        raise OSError(f"datasets[{name!r}] cannot be read: {error}") from error
    except (AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise ValueError(
            f"datasets[{name!r}] cannot be read as a table: {describe_value(dataset)}; "
            f"{type(error).__name__}: {error}"
        ) from error


def to_ray_datasets(datasets: Mapping[str, object]) -> dict[str, Dataset]:
    """Convert tables and map-style datasets to Ray Data datasets."""
    return {name: _to_ray_dataset(dataset) for name, dataset in datasets.items()}


def _to_ray_dataset(source: Any) -> Dataset:
    _require_ray_data()
    import ray.data

    if is_ray_dataset(source):
        dataset: Dataset = source
    elif is_map_style(source):
        dataset = ray.data.from_torch(source)
    else:
        dataset = ray.data.from_blocks([source])
    return dataset


def is_map_style(value: object) -> bool:
    """Return whether a value is a PyTorch map-style dataset, without importing PyTorch."""
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(value).__mro__}
    has_items = hasattr(value, "__getitem__") and hasattr(value, "__len__")
    return has_items and "torch.utils.data.dataset.Dataset" in names


def is_table(value: object) -> bool:
    """Return whether a value is a table (Arrow, pandas, polars ...) or a Hugging Face dataset."""
    return hasattr(value, "__arrow_c_stream__") or _is_hugging_face_dataset(value)


def is_path_or_paths(value: object) -> bool:
    """Return whether a value is a path or a list of paths."""
    if isinstance(value, list | tuple):
        return bool(value) and all(isinstance(path, str | os.PathLike) for path in value)
    return isinstance(value, str | os.PathLike)


def _is_hugging_face_dataset(value: object) -> bool:
    return all(hasattr(value, name) for name in ("with_format", "features", "__len__"))


def to_arrow_table(table: Any) -> pa.Table:
    """Convert a table to an Arrow table, without its index."""
    import pyarrow as pa

    if isinstance(table, pa.Table):
        return table
    if _is_hugging_face_dataset(table):
        return table.with_format("arrow")[:]
    if hasattr(table, "iloc"):
        return pa.Table.from_pandas(table, preserve_index=False)
    return pa.table(table)


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
    dataset = to_ray_datasets(make_datasets(train))[TRAIN_DATASET_KEY]
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
    return _transform(preprocessor, make_datasets({name: make})[name])


def _transform(preprocessor: Preprocessor, dataset: Any) -> Dataset | pa.Table:
    """Transform a table immediately, and a Ray Data dataset when it is read."""
    if is_ray_dataset(dataset):
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
