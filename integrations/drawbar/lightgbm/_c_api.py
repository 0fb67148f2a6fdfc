"""LightGBM's C functions that its Python package does not wrap, or wraps only as a part of more.

The C API (https://github.com/microsoft/LightGBM/blob/master/include/LightGBM/c_api.h) is stable and
public; what is borrowed from the Python package is the loaded library and its error check. All that
Drawbar needs of either is in this module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lightgbm import Booster, Dataset, basic
from lightgbm.basic import _param_dict_to_str, _safe_call

from drawbar.lightgbm._parameters import get_parameter

Columns = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]

_LIB: Any = basic._LIB  # type: ignore[attr-defined]  # imported there

_ZERO = 1e-35  # what LightGBM takes for zero, and leaves out of a sampled column
_ARROW_ARRAY_BYTES, _ARROW_SCHEMA_BYTES = 80, 72  # of Arrow's C structures, on 64 bits


def init_network(machines: Sequence[str], port: int, timeout_minutes: int) -> None:
    """Connect this thread to all others; afterwards training in this thread is distributed.

    The network belongs to the thread: another thread of the same process has none.

    Args:
        machines: "address:port" of each rank, in rank order.
        port: This rank's port, bound here.
        timeout_minutes: How long to wait for another rank.

    Raises:
        LightGBMError: The port is taken, or a rank was not reached.
    """
    _safe_call(
        _LIB.LGBM_NetworkInit(
            ",".join(machines).encode(),
            ctypes.c_int(port),
            ctypes.c_int(timeout_minutes),
            ctypes.c_int(len(machines)),
        )
    )


def free_network() -> None:
    """Close this thread's connections, if it has any."""
    _safe_call(_LIB.LGBM_NetworkFree())


def compute_bins(sample: Columns, rows: int, params: Mapping[str, object]) -> bytes:
    """Find the bins of all features from a sample of rows; gives them in LightGBM's own format.

    Args:
        sample: Features by rows. LightGBM sorts it in place, and so does this.
        rows: How many rows the sample stands for.
        params: Dataset parameters, such as `max_bin`; `num_threads`, at least 1, is among them;
            categorical features by number.

    Raises:
        LightGBMError: A parameter is wrong.
    """
    all_rows = np.arange(sample.shape[1], dtype=np.int32)
    with ThreadPoolExecutor(int(get_parameter(params, "num_threads"))) as pool:
        sampled = list(pool.map(lambda column: _nonzero_values(column, all_rows), sample))
    columns, indices = zip(*sampled, strict=True)
    lengths = np.array([len(column) for column in columns], dtype=np.int32)
    handle = ctypes.c_void_p()
    _safe_call(
        _LIB.LGBM_DatasetCreateFromSampledColumn(
            _pointers(columns, ctypes.c_double),
            _pointers(indices, ctypes.c_int32),
            ctypes.c_int32(len(columns)),
            lengths.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            ctypes.c_int32(sample.shape[1]),
            ctypes.c_int32(sample.shape[1]),
            ctypes.c_int64(rows),
            _param_dict_to_str(dict(params)).encode(),
            ctypes.byref(handle),
        )
    )
    try:
        return _serialize_reference(handle)
    finally:
        _safe_call(_LIB.LGBM_DatasetFree(handle))


def _nonzero_values(column: Columns, all_rows: Int32Array) -> tuple[Columns, Int32Array]:
    """Give a sampled column's values but zeros, ascending, and the rows that they were in.

    LightGBM too sorts the values and leaves the rows as they were; NumPy sorts several times
    faster, and LightGBM is then through with them sooner. It takes NaN out before it sorts.
    """
    is_zero = np.abs(column) <= _ZERO
    rows = all_rows[~is_zero] if is_zero.any() else all_rows
    values = column[rows] if is_zero.any() else column
    if not np.isnan(values).any():
        values.sort()
    return values, rows


def create_dataset(
    reference: bytes, batches: Sequence[pa.RecordBatch], params: Mapping[str, object]
) -> Dataset:
    """Make a dataset of rows, with the bins of a reference.

    LightGBM reads columns, as Arrow has them, a quarter faster than rows that are pushed.

    Args:
        reference: From `compute_bins`.
        batches: The rows, at least one batch; they are read where they lie.
        params: Dataset parameters.
    """
    text = _param_dict_to_str(dict(params)).encode()
    chunks = ctypes.create_string_buffer(_ARROW_ARRAY_BYTES * len(batches))
    for number, batch in enumerate(batches):
        batch._export_to_c(ctypes.addressof(chunks) + _ARROW_ARRAY_BYTES * number)
    schema = ctypes.create_string_buffer(_ARROW_SCHEMA_BYTES)
    batches[0].schema._export_to_c(ctypes.addressof(schema))
    bins, handle = ctypes.c_void_p(), ctypes.c_void_p()
    _safe_call(
        _LIB.LGBM_DatasetCreateFromSerializedReference(
            reference,
            ctypes.c_int32(len(reference)),
            # One row, which nobody fills: only the bins are wanted.
            ctypes.c_int64(1),
            ctypes.c_int32(1),
            text,
            ctypes.byref(bins),
        )
    )
    try:
        _safe_call(
            _LIB.LGBM_DatasetCreateFromArrow(
                ctypes.c_int64(len(batches)), chunks, schema, text, bins, ctypes.byref(handle)
            )
        )
    finally:
        _safe_call(_LIB.LGBM_DatasetFree(bins))
    dataset = Dataset(None, params=dict(params))
    dataset._handle = handle
    return dataset.set_feature_name(batches[0].schema.names)


def prepend_trees(booster: Booster, earlier: Booster) -> None:
    """Put the trees of an earlier booster before those of this one, which has none yet."""
    _safe_call(_LIB.LGBM_BoosterMerge(booster._handle, earlier._handle))


def current_predictions(booster: Booster, data_index: int) -> npt.NDArray[np.float64]:
    """Give the current predictions of a dataset that is attached to a booster.

    Args:
        booster: In training.
        data_index: 0 for the training data, then the validation sets in order.
    """
    length = ctypes.c_int64()
    index = ctypes.c_int(data_index)
    _safe_call(_LIB.LGBM_BoosterGetNumPredict(booster._handle, index, ctypes.byref(length)))
    values = np.empty(length.value, dtype=np.float64)
    pointer = values.ctypes.data_as(ctypes.POINTER(ctypes.c_double))
    _safe_call(_LIB.LGBM_BoosterGetPredict(booster._handle, index, ctypes.byref(length), pointer))
    return values


def _serialize_reference(handle: ctypes.c_void_p) -> bytes:
    buffer, length = ctypes.c_void_p(), ctypes.c_int32()
    _safe_call(
        _LIB.LGBM_DatasetSerializeReferenceToBinary(
            handle, ctypes.byref(buffer), ctypes.byref(length)
        )
    )
    content = ctypes.create_string_buffer(length.value)
    start = ctypes.addressof(content)
    numbers = range(length.value)  # the C API gives one byte at a time
    try:
        list(map(_BYTE_AT, repeat(buffer), numbers, range(start, start + length.value)))
    finally:
        _safe_call(_LIB.LGBM_ByteBufferFree(buffer))
    return content.raw


_BYTE_AT = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)(
    ("LGBM_ByteBufferGetAt", _LIB)
)
"""With types of its own, which are the package's to set for the function that all share. It has
nothing to complain of but a number that is not below the length."""


def _pointers(arrays: Sequence[npt.NDArray[Any]], kind: type[Any]) -> object:
    pointer = ctypes.POINTER(kind)
    return (pointer * len(arrays))(*(array.ctypes.data_as(pointer) for array in arrays))
