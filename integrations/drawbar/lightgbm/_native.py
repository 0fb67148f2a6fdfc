"""LightGBM's C functions that its Python package does not wrap, or wraps only as a part of more.

The C API (https://github.com/microsoft/LightGBM/blob/master/include/LightGBM/c_api.h) is stable and
public; what is borrowed from the Python package is the loaded library and its error check. All that
Drawbar needs of either is in this module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from lightgbm import Booster, Dataset, basic
from lightgbm.basic import _param_dict_to_str, _safe_call

Matrix = npt.NDArray[np.float32]

_LIB: Any = basic._LIB  # type: ignore[attr-defined]  # imported there

_FLOAT32 = 0  # C_API_DTYPE_FLOAT32
_ZERO = 1e-35  # what LightGBM takes for zero, and leaves out of a sampled column


def join_network(machines: Sequence[str], port: int, timeout_minutes: int) -> None:
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


def leave_network() -> None:
    """Close this thread's connections, if it has any."""
    _safe_call(_LIB.LGBM_NetworkFree())


def bin_reference(sample: Matrix, rows: int, params: Mapping[str, Any]) -> bytes:
    """Find the bins of all features from a sample of rows; gives them in LightGBM's own format.

    Args:
        sample: Rows by features.
        rows: How many rows the sample stands for.
        params: Dataset parameters, such as `max_bin`; categorical features by number.

    Raises:
        LightGBMError: A parameter is wrong.
    """
    columns, indices = [], []
    for column in sample.T:
        (kept,) = np.nonzero(~(np.abs(column) <= _ZERO))
        columns.append(column[kept].astype(np.float64))
        indices.append(kept.astype(np.int32))
    lengths = np.array([len(column) for column in columns], dtype=np.int32)
    handle = ctypes.c_void_p()
    _safe_call(
        _LIB.LGBM_DatasetCreateFromSampledColumn(
            _pointers(columns, ctypes.c_double),
            _pointers(indices, ctypes.c_int32),
            ctypes.c_int32(len(columns)),
            lengths.ctypes.data_as(ctypes.POINTER(ctypes.c_int32)),
            ctypes.c_int32(len(sample)),
            ctypes.c_int32(len(sample)),
            ctypes.c_int64(rows),
            _param_dict_to_str(dict(params)).encode(),
            ctypes.byref(handle),
        )
    )
    try:
        return _serialized(handle)
    finally:
        _safe_call(_LIB.LGBM_DatasetFree(handle))


def empty_dataset(
    reference: bytes, rows: int, params: Mapping[str, Any], feature_names: Sequence[str]
) -> Dataset:
    """Make a dataset with the bins of a reference and room for so many rows, to be pushed."""
    handle = ctypes.c_void_p()
    _safe_call(
        _LIB.LGBM_DatasetCreateFromSerializedReference(
            reference,
            ctypes.c_int32(len(reference)),
            ctypes.c_int64(rows),
            ctypes.c_int32(1),
            _param_dict_to_str(dict(params)).encode(),
            ctypes.byref(handle),
        )
    )
    dataset = Dataset(None, params=dict(params))
    dataset._handle = handle
    dataset.set_field("init_score", None)  # made with zeros, which count as if they had been set
    return dataset.set_feature_name(list(feature_names))


def push_rows(dataset: Dataset, rows: Matrix, start: int) -> None:
    """Put rows into a dataset; `start` is the number of the first. The last row finishes it."""
    block = np.ascontiguousarray(rows, dtype=np.float32)
    _safe_call(
        _LIB.LGBM_DatasetPushRows(
            dataset._handle,
            block.ctypes.data_as(ctypes.c_void_p),
            ctypes.c_int(_FLOAT32),
            ctypes.c_int32(block.shape[0]),
            ctypes.c_int32(block.shape[1]),
            ctypes.c_int32(start),
        )
    )


def put_before(booster: Booster, earlier: Booster) -> None:
    """Put the trees of an earlier booster before those of this one, which has none yet."""
    _safe_call(_LIB.LGBM_BoosterMerge(booster._handle, earlier._handle))


def predictions(booster: Booster, data_index: int) -> npt.NDArray[np.float64]:
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


def _serialized(handle: ctypes.c_void_p) -> bytes:
    buffer, length = ctypes.c_void_p(), ctypes.c_int32()
    _safe_call(
        _LIB.LGBM_DatasetSerializeReferenceToBinary(
            handle, ctypes.byref(buffer), ctypes.byref(length)
        )
    )
    value, content = ctypes.c_uint8(), bytearray(length.value)
    try:
        for index in range(length.value):  # the C API gives one byte at a time
            _safe_call(
                _LIB.LGBM_ByteBufferGetAt(buffer, ctypes.c_int32(index), ctypes.byref(value))
            )
            content[index] = value.value
    finally:
        _safe_call(_LIB.LGBM_ByteBufferFree(buffer))
    return bytes(content)


def _pointers(arrays: Sequence[npt.NDArray[Any]], kind: type[Any]) -> Any:
    pointer = ctypes.POINTER(kind)
    return (pointer * len(arrays))(*(array.ctypes.data_as(pointer) for array in arrays))
