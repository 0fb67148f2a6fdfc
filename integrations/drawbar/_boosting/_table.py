"""Recognize pandas and Arrow tables without importing pandas."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, TypeAlias, TypeGuard

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

Table: TypeAlias = "pd.DataFrame | pa.Table"


def is_table(value: object) -> TypeGuard[Table]:
    """Return whether a value is a table. Imports neither pandas nor Arrow."""
    kinds = [
        getattr(sys.modules.get(module), name, None)
        for module, name in (("pandas", "DataFrame"), ("pyarrow", "Table"))
    ]
    return any(isinstance(kind, type) and isinstance(value, kind) for kind in kinds)


def column_types(table: Table) -> dict[str, pa.DataType]:
    """Return the Arrow type of each column."""
    import pyarrow as pa

    schema = table.schema if isinstance(table, pa.Table) else pa.Schema.from_pandas(table)
    return dict(zip(schema.names, schema.types, strict=True))
