"""Validate, normalize, and encode reported metrics.

JSON has no NaN and no infinity, and a score that silently becomes null would break ranking later.
Non-finite floats are therefore encoded as `{"$float": "nan"}` and decoded to the same floats.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

_PLAIN_TYPES = (float, bool, int, type(None))
_FLOAT_TAG = "$float"
_NON_FINITE = ("nan", "inf", "-inf")
_MAX_LISTED = 20


Metrics = dict[str, Any]
"""Reported metrics: JSON values, including NaN and infinity."""


class _Array(Protocol):
    """A NumPy scalar, array, or tensor."""

    @property
    def shape(self) -> Iterable[int]: ...


def normalize(metrics: object) -> Metrics:
    """Convert reported metrics to plain Python values.

    Accepts JSON values, and arrays and tensors with one element from NumPy, PyTorch, JAX,
    TensorFlow, and Keras. Keys are converted to strings.

    Raises:
        TypeError: `metrics` is no mapping, or a value has an unsupported type. The message names
            its key.
        ValueError: A tensor or array has more than one element, a string is not valid Unicode, or a
            value is nested too deeply.
    """
    if not isinstance(metrics, Mapping):
        raise TypeError(f"report() takes a dict of metrics, found {metrics!r}")
    return {
        _check_text(str(key), key): _normalize_top_level(value, str(key))
        for key, value in metrics.items()
    }


def _normalize_top_level(value: object, key: str) -> object:
    try:
        return _normalize_value(value, key)
    except RecursionError:
        raise ValueError(
            f"metric {key!r} is nested too deeply, or contains itself; metrics are JSON "
            "values. Save larger objects in a checkpoint"
        ) from None


def _normalize_value(value: object, key: str) -> object:
    # Fast path for nearly all metrics.
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, str):
        return _check_text(str.__str__(value), key)  # __str__ of an enum would return its name
    if isinstance(value, Mapping):
        return {
            _check_text(str(k), f"{key}/{k}"): _normalize_value(v, f"{key}/{k}")
            for k, v in value.items()
        }
    if isinstance(value, list | tuple):
        return [_normalize_value(v, f"{key}/{i}") for i, v in enumerate(value)]
    if hasattr(value, "shape") and (hasattr(value, "item") or hasattr(value, "numpy")):
        return _normalize_value(_extract_scalar(cast("_Array", value), key), key)
    if isinstance(value, int | float):  # enums and other subclasses
        return int(value) if isinstance(value, int) else float(value)
    raise TypeError(
        f"metric {key!r} is a {type(value).__module__}.{type(value).__qualname__}; metrics "
        "can be numbers, strings, booleans, None, lists and dicts of them, and tensors with one "
        "element. Save larger objects in a checkpoint"
    )


def _check_text(text: str, key: object) -> str:
    try:
        # A lone surrogate is a valid str in Python but cannot be encoded.
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"metric {key!r} contains text that is not valid UTF-8: {error}") from None
    return text


def _extract_scalar(value: _Array, key: str) -> object:
    shape = tuple(value.shape)
    if math.prod(shape) != 1:
        raise ValueError(
            f"metric {key!r} is a {type(value).__name__} of shape {shape}; metrics can be "
            "tensors with one element. Reduce it, for example with .mean(), or pass .tolist()"
        )
    # TensorFlow tensors and Keras variables have no item(), but numpy() returns an array that has.
    scalar: Any = value if hasattr(value, "item") else cast("Any", value).numpy()
    return scalar.item() if hasattr(scalar, "item") else scalar


def encode_non_finite(value: object) -> object:
    """Replace NaN and infinities by JSON values. Other values are returned unchanged."""
    if type(value) is float and not math.isfinite(value):
        return {_FLOAT_TAG: repr(value)}
    if isinstance(value, dict):
        return {k: encode_non_finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [encode_non_finite(v) for v in value]
    return value


def decode_non_finite(value: object) -> object:
    """Reverse `encode_non_finite`."""
    if isinstance(value, dict):
        if len(value) == 1 and value.get(_FLOAT_TAG) in _NON_FINITE:
            return float(value[_FLOAT_TAG])
        return {k: decode_non_finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [decode_non_finite(v) for v in value]
    return value


def flatten(metrics: Mapping[str, object], prefix: str = "") -> Metrics:
    """Join nested keys with "/": `{"val": {"loss": 1}}` becomes `{"val/loss": 1}`."""
    flat: Metrics = {}
    for key, value in metrics.items():
        if isinstance(value, Mapping):
            flat.update(flatten(value, f"{prefix}{key}/"))
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def describe_available(reported: Iterable[Mapping[str, object]], *, missing_name: str) -> str:
    """Return a sentence that lists the available metrics and the closest name to a missing one."""
    names = sorted({name for metrics in reported for name in flatten(metrics)})
    if not names:
        return "There are no metrics."
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    listed = ", ".join(map(repr, names[:_MAX_LISTED]))
    matches = difflib.get_close_matches(missing_name, names, n=1)
    hint = f"; did you mean {matches[0]!r}?" if matches else "."
    return f"There are {listed}{more}{hint}"
