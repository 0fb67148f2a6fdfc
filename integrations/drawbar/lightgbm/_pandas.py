"""pandas frames as LightGBM takes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas

_NULLABLE = {"i": "Int", "u": "UInt", "f": "Float"}


def normalize_pandas_for_lightgbm(df: pandas.DataFrame) -> pandas.DataFrame:
    """Give a frame whose Arrow-backed numbers and booleans are NumPy's, which LightGBM takes.

    The name is Ray Train's, so that a script which calls it moves over as it is.

    `Dataset.to_pandas()` of Ray Data gives Arrow-backed columns. Gaps stay gaps, the values are not
    looked at, and other columns are left as they are.
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
