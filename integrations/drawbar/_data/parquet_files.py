"""Read Parquet files whose schemas may differ."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.dataset
    from ray.data import Dataset

MAX_OBJECT_STORE_FRACTION = 0.25
"""Fraction of a node's object store that Parquet files may fill; larger ones are streamed."""


def read_parquet(path_or_paths: Any) -> pa.Table | Dataset:
    """Read Parquet files, or return a streamed Ray Data dataset if they are too large.

    Both have the columns of all files and the columns of Hive directories such as `day=3/`. A
    column has the smallest type that holds the values of all files, and is null in files without
    it.

    Raises:
        FileNotFoundError: There are no Parquet files in the paths.
        ValueError: A column has types that cannot be combined, such as boolean and integer.
    """
    import pyarrow.dataset
    import ray.data

    is_list = isinstance(path_or_paths, list | tuple)
    paths = [os.fspath(path) for path in path_or_paths] if is_list else os.fspath(path_or_paths)
    base = _find_base_directory(paths)
    if isinstance(paths, list):
        paths = [file for path in paths for file in _list_files(path)]
    files = _open_files(paths, base)
    if not files.files:
        raise FileNotFoundError(f"there is no Parquet file in {paths}")
    fragments = list(files.get_fragments())
    columns = _unify_schemas(fragments)
    partitions = pyarrow.schema(
        [field for field in files.schema if field.name not in columns.names]
    )
    _check_hive_columns(fragments, columns, os.path.abspath(base or str(paths)))
    for field in partitions:
        columns = columns.append(field)
    nbytes = sum(group.total_byte_size for each in fragments for group in each.row_groups)
    stores = [node["Resources"].get("object_store_memory", 0) for node in _list_alive_nodes()]
    if nbytes > MAX_OBJECT_STORE_FRACTION * min(stores, default=0):
        # Ray Data adds a column for every Hive directory of the path.
        streamed: Dataset = ray.data.read_parquet(paths, schema=columns)
        return streamed.select_columns(columns.names)
    partitioning = pyarrow.dataset.partitioning(partitions, flavor="hive")
    dataset = pyarrow.dataset.dataset(
        paths, columns, "parquet", partitioning=partitioning, partition_base_dir=base
    )
    try:
        return dataset.to_table()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(_describe_failed_cast(fragments, columns) or str(error)) from error


def _find_base_directory(paths: str | list[str]) -> str | None:
    """Find the directory above the Hive directories of a file or of several files."""
    if isinstance(paths, list):
        return os.path.commonpath([os.path.dirname(path) for path in paths])
    return os.path.dirname(paths) if os.path.isfile(paths) else None


def _list_files(path: str) -> list[str]:
    import pyarrow.dataset

    if not os.path.isdir(path):
        return [path]
    files: list[str] = pyarrow.dataset.dataset(path, pyarrow.schema([]), "parquet").files
    return files


def _open_files(paths: str | list[str], base: str | None) -> pyarrow.dataset.FileSystemDataset:
    import pyarrow as pa
    import pyarrow.dataset

    try:
        return pyarrow.dataset.dataset(
            paths, format="parquet", partitioning="hive", partition_base_dir=base
        )
    except pa.ArrowTypeError:  # the column of a Hive directory is in the files too
        return pyarrow.dataset.dataset(paths, format="parquet")
    except pa.ArrowInvalid:
        for fragment in pyarrow.dataset.dataset(paths, pa.schema([]), "parquet").get_fragments():
            _check_duplicates(fragment)
        raise


def _check_duplicates(fragment: pyarrow.dataset.ParquetFileFragment) -> None:
    names = fragment.physical_schema.names
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"{fragment.path} has {names.count(name)} columns {name!r}. Rename them"
            )


def _check_hive_columns(
    fragments: list[pyarrow.dataset.ParquetFileFragment], columns: pa.Schema, base: str
) -> None:
    """Check that a column is not in some files and in the directory names of others."""
    for fragment in fragments:
        missing = {*columns.names} - {*fragment.physical_schema.names}
        for directory in fragment.path.removeprefix(base).split("/")[:-1]:
            name, is_hive, _ = directory.partition("=")
            if is_hive and name in missing:
                raise ValueError(
                    f"column {name!r} is in some files, but {fragment.path} has it only in its "
                    "path. Write it into all files or into none"
                )


def _unify_schemas(fragments: list[pyarrow.dataset.ParquetFileFragment]) -> pa.Schema:
    import pyarrow as pa

    columns = fragments[0].physical_schema
    for fragment in fragments:
        if columns.equals(fragment.physical_schema):
            continue
        _check_duplicates(fragment)
        try:
            columns = _unify_pair(columns, fragment.physical_schema)
        except (pa.ArrowTypeError, pa.ArrowInvalid) as error:
            raise ValueError(_describe_conflict(fragments, fragment) or str(error)) from error
    return columns


def _unify_pair(first: pa.Schema, second: pa.Schema) -> pa.Schema:
    """Return a schema that holds the values of both; categories and strings become strings."""
    import pyarrow as pa

    is_category = pa.types.is_dictionary
    types = [{field.name: field.type for field in schema} for schema in (first, second)]
    mixed = {
        name
        for name in types[0].keys() & types[1].keys()
        if is_category(types[0][name]) != is_category(types[1][name])
        and pa.null() not in (types[0][name], types[1][name])
    }
    decoded = [
        pa.schema(
            [
                field.with_type(field.type.value_type)
                if field.name in mixed and is_category(field.type)
                else field
                for field in schema
            ],
            schema.metadata,
        )
        for schema in (first, second)
    ]
    return pa.unify_schemas(decoded, promote_options="permissive")


def _describe_failed_cast(
    fragments: list[pyarrow.dataset.ParquetFileFragment], columns: pa.Schema
) -> str | None:
    """Describe the first column of a file with a value that the common type cannot hold."""
    import pyarrow as pa

    for fragment in fragments:
        for field in fragment.physical_schema:
            common = columns.field(field.name).type
            if field.type == common:
                continue
            try:
                fragment.to_table(columns, [field.name])
            except pa.ArrowInvalid as error:
                return (
                    f"column {field.name!r} has type {field.type} in {fragment.path}, and with "
                    f"the other files type {common}, which cannot hold its values: {error}. "
                    "Write the files with the same type"
                )
    return None


def _describe_conflict(
    fragments: list[pyarrow.dataset.ParquetFileFragment],
    fragment: pyarrow.dataset.ParquetFileFragment,
) -> str | None:
    """Describe the first column of a file that has another type in an earlier file."""
    import pyarrow as pa

    for field in fragment.physical_schema:
        for earlier in fragments[: fragments.index(fragment)]:
            index = earlier.physical_schema.get_field_index(field.name)
            if index < 0:
                continue
            other = earlier.physical_schema.field(index)
            try:
                _unify_pair(pa.schema([other]), pa.schema([field]))
            except (pa.ArrowTypeError, pa.ArrowInvalid):
                return (
                    f"column {field.name!r} has type {other.type} in {earlier.path} and type "
                    f"{field.type} in {fragment.path}. Write the files with the same type"
                )
    return None


def _list_alive_nodes() -> list[dict[str, dict[str, float]]]:
    import ray

    if not ray.is_initialized():
        ray.init()
    return [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]  # Ray has no types here
