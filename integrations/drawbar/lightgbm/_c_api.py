"""LightGBM C API functions that its Python package does not wrap.

The C API (https://github.com/microsoft/LightGBM/blob/master/include/LightGBM/c_api.h) is stable and
public. All its uses are in this module. `_compat.py` has the access to the loaded library.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from lightgbm import Booster, Dataset

from drawbar.lightgbm._compat import (
    LIBRARY,
    check_error,
    export_to_arrow_c,
    format_parameters,
    get_handle,
    make_dataset,
)
from drawbar.lightgbm._parameters import get_parameter

Columns = npt.NDArray[np.float64]
Int32Array = npt.NDArray[np.int32]

_ZERO = 1e-35  # values up to this are zero for LightGBM and omitted from a sampled column
_ARROW_ARRAY_BYTES, _ARROW_SCHEMA_BYTES = 80, 72  # sizes of Arrow's C structures on 64 bits


def init_network(machines: Sequence[str], port: int, timeout_minutes: int) -> None:
    """Connect this thread to all other ranks. Training in this thread is then distributed.

    The network belongs to the thread. Other threads of the process are not connected.

    Args:
        machines: "address:port" of each rank, in rank order.
        port: This rank's port, which is bound here.
        timeout_minutes: Time to wait for another rank.

    Raises:
        LightGBMError: The port is in use, or a rank cannot be reached.
    """
    check_error(
        LIBRARY.LGBM_NetworkInit(
            ",".join(machines).encode(),
            ctypes.c_int(port),
            ctypes.c_int(timeout_minutes),
            ctypes.c_int(len(machines)),
        )
    )


def free_network() -> None:
    """Close this thread's connections, if there are any."""
    check_error(LIBRARY.LGBM_NetworkFree())


def compute_bins(sample: Columns, rows: int, params: Mapping[str, object]) -> bytes:
    """Compute the bins of all features from a sample of rows, in LightGBM's format.

    Args:
        sample: Sample with shape (features, rows). It is sorted in place, as in LightGBM.
        rows: Number of rows that the sample represents.
        params: Dataset parameters, such as `max_bin`. They must include `num_threads`, at least 1,
            and categorical features as numbers.

    Raises:
        LightGBMError: A parameter is invalid.
    """
    all_rows = np.arange(sample.shape[1], dtype=np.int32)
    with ThreadPoolExecutor(int(get_parameter(params, "num_threads"))) as pool:
        sampled = list(pool.map(lambda column: _nonzero_values(column, all_rows), sample))
    columns, indices = zip(*sampled, strict=True)
    lengths = np.array([len(column) for column in columns], dtype=np.int32)
    handle = ctypes.c_void_p()
    check_error(
        LIBRARY.LGBM_DatasetCreateFromSampledColumn(
            _pointers(columns, ctypes.c_double),
            _pointers(indices, ctypes.c_int32),
            ctypes.c_int32(len(columns)),
            lengths.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            ctypes.c_int32(sample.shape[1]),
            ctypes.c_int32(sample.shape[1]),
            ctypes.c_int64(rows),
            format_parameters(dict(params)).encode(),
            ctypes.byref(handle),
        )
    )
    try:
        return _serialize_reference(handle)
    finally:
        check_error(LIBRARY.LGBM_DatasetFree(handle))


def _nonzero_values(column: Columns, all_rows: Int32Array) -> tuple[Columns, Int32Array]:
    """Return the nonzero values of a sampled column in ascending order, and their rows.

    LightGBM also sorts only the values. NumPy sorts several times faster, and LightGBM is faster
    with sorted values. LightGBM removes NaN before it sorts.
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
    """Create a dataset of rows with the bins of a reference.

    LightGBM reads Arrow columns 25 % faster than pushed rows.

    Args:
        reference: Result of `compute_bins`.
        batches: Rows, at least one batch. They are not copied.
        params: Dataset parameters.
    """
    text = format_parameters(dict(params)).encode()
    chunks = ctypes.create_string_buffer(_ARROW_ARRAY_BYTES * len(batches))
    for number, batch in enumerate(batches):
        export_to_arrow_c(batch, ctypes.addressof(chunks) + _ARROW_ARRAY_BYTES * number)
    schema = ctypes.create_string_buffer(_ARROW_SCHEMA_BYTES)
    export_to_arrow_c(batches[0].schema, ctypes.addressof(schema))
    bins, handle = ctypes.c_void_p(), ctypes.c_void_p()
    check_error(
        LIBRARY.LGBM_DatasetCreateFromSerializedReference(
            reference,
            ctypes.c_int32(len(reference)),
            # One row, which is never filled: only the bins are used.
            ctypes.c_int64(1),
            ctypes.c_int32(1),
            text,
            ctypes.byref(bins),
        )
    )
    try:
        check_error(
            LIBRARY.LGBM_DatasetCreateFromArrow(
                ctypes.c_int64(len(batches)), chunks, schema, text, bins, ctypes.byref(handle)
            )
        )
    finally:
        check_error(LIBRARY.LGBM_DatasetFree(bins))
    return make_dataset(handle, dict(params)).set_feature_name(batches[0].schema.names)


def prepend_trees(booster: Booster, earlier: Booster) -> None:
    """Insert the trees of an earlier booster into a booster that has no trees yet."""
    check_error(LIBRARY.LGBM_BoosterMerge(get_handle(booster), get_handle(earlier)))


def current_predictions(booster: Booster, data_index: int) -> npt.NDArray[np.float64]:
    """Return the current predictions for a dataset that is attached to a booster.

    Args:
        booster: Booster in training.
        data_index: 0 for the training data, then the validation sets in order.
    """
    length = ctypes.c_int64()
    index = ctypes.c_int(data_index)
    check_error(LIBRARY.LGBM_BoosterGetNumPredict(get_handle(booster), index, ctypes.byref(length)))
    values = np.empty(length.value, dtype=np.float64)
    pointer = values.ctypes.data_as(ctypes.POINTER(ctypes.c_double))
    check_error(
        LIBRARY.LGBM_BoosterGetPredict(get_handle(booster), index, ctypes.byref(length), pointer)
    )
    return values


def _serialize_reference(handle: ctypes.c_void_p) -> bytes:
    buffer, length = ctypes.c_void_p(), ctypes.c_int32()
    check_error(
        LIBRARY.LGBM_DatasetSerializeReferenceToBinary(
            handle, ctypes.byref(buffer), ctypes.byref(length)
        )
    )
    content = ctypes.create_string_buffer(length.value)
    start = ctypes.addressof(content)
    numbers = range(length.value)  # the C API returns one byte at a time
    try:
        list(map(_get_byte_reader(), repeat(buffer), numbers, range(start, start + length.value)))
    finally:
        check_error(LIBRARY.LGBM_ByteBufferFree(buffer))
    return content.raw


@functools.cache
def _get_byte_reader() -> Callable[[ctypes.c_void_p, int, int], int]:
    """Return `LGBM_ByteBufferGetAt`, whose only error is an index that is out of range.

    It is a separate function object, because the types of the shared one belong to LightGBM's
    package.
    """
    prototype = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int32, ctypes.c_void_p)
    return prototype(("LGBM_ByteBufferGetAt", LIBRARY))


def _pointers(arrays: Sequence[npt.NDArray[Any]], kind: type[Any]) -> object:
    pointer = ctypes.POINTER(kind)
    return (pointer * len(arrays))(*(array.ctypes.data_as(pointer) for array in arrays))
