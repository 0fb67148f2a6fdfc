"""Tables in memory as datasets: a pandas DataFrame or an Arrow table."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa
    from ray.data import Dataset

Table: TypeAlias = "pd.DataFrame | pa.Table"


def is_table(given: object) -> TypeGuard[Table]:
    """Whether something is a table; imports neither library, as whoever has one has done that."""
    kinds = [
        getattr(sys.modules.get(module), name, None)
        for module, name in (("pandas", "DataFrame"), ("pyarrow", "Table"))
    ]
    return any(isinstance(kind, type) and isinstance(given, kind) for kind in kinds)


def of_table(table: Table) -> Callable[[], Dataset]:
    """Give what makes a dataset of a table, once Ray runs."""
    return partial(_make_dataset, table)


def _make_dataset(table: Any) -> Dataset:
    import ray.data

    is_frame = hasattr(table, "iloc")
    made: Dataset = ray.data.from_pandas(table) if is_frame else ray.data.from_arrow(table)
    return made


def types_of_table(table: Table) -> dict[str, Any]:
    """Give Arrow's type of each column."""
    import pyarrow as pa

    schema = table.schema if isinstance(table, pa.Table) else pa.Schema.from_pandas(table)
    return dict(zip(schema.names, schema.types, strict=True))
