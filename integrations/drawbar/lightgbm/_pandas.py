"""normalize_pandas_for_lightgbm: convert Arrow-backed columns to NumPy."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

_NULLABLE = {"i": "Int", "u": "UInt", "f": "Float"}


def normalize_pandas_for_lightgbm(df: pandas.DataFrame) -> pandas.DataFrame:
    """Convert Arrow-backed numbers and booleans of a DataFrame to types that LightGBM accepts.

    `Dataset.to_pandas()` of Ray Data returns Arrow-backed columns. Missing values are kept, and
    other columns are not changed. The function has the same name as in Ray Train.

    Args:
        df: DataFrame with any columns.

    Returns:
        The DataFrame with pandas' nullable types in place of Arrow's.

    Example:
        ```python
        df = drawbar.lightgbm.normalize_pandas_for_lightgbm(dataset.to_pandas())
        data = lightgbm.Dataset(df.drop(columns="y"), df["y"])
        ```
    """
    import pandas

    kinds = {}
    for name, dtype in df.dtypes.items():
        if not isinstance(dtype, pandas.ArrowDtype):
            continue
        numpy = dtype.numpy_dtype
        if numpy.kind == "b":
            kinds[name] = "boolean"
        elif numpy.kind in _NULLABLE:
            bits = 8 * numpy.itemsize
            kinds[name] = f"{_NULLABLE[numpy.kind]}{max(bits, 32) if numpy.kind == 'f' else bits}"
    return df.astype(kinds) if kinds else df
