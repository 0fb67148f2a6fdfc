"""Reported metrics: what is taken, and how they are written so that nothing changes on the way.

JSON has no NaN and no infinity; a score that silently becomes null breaks ranking later. So they
are written as `{"$float": "nan"}`, and come back as the floats they were.
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
"""Reported metrics: what JSON can hold, NaN and infinity too. Users compute with the values."""


class _Array(Protocol):
    """A NumPy scalar, an array or a tensor."""

    @property
    def shape(self) -> Iterable[int]: ...


def normalize(metrics: object) -> Metrics:
    """Turn what the user reported into plain Python values.

    Takes any JSON-able value, and arrays and tensors of one element, of NumPy, PyTorch, JAX,
    TensorFlow and Keras. Keys become strings.

    Raises:
        TypeError: `metrics` is no mapping, or a value is none of these; the message names its key.
        ValueError: a tensor or array has more than one element, text is no valid Unicode, or a
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
            f"metric {key!r} is nested too deeply, or holds itself; report() takes what JSON can "
            "hold. Put larger objects into a checkpoint"
        ) from None


def _normalize_value(value: object, key: str) -> object:
    # Nearly all metrics are: the rest is not looked at for these.
    if type(value) in _PLAIN_TYPES:
        return value
    if isinstance(value, str):
        return _check_text(str.__str__(value), key)  # an enum's own __str__ gives its name
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
        f"metric {key!r} is a {type(value).__module__}.{type(value).__qualname__}; report() takes "
        "numbers, strings, booleans, None, lists and dicts of them, and tensors of one element. "
        "Put larger objects into a checkpoint"
    )


def _check_text(text: str, key: object) -> str:
    try:
        # Half of a surrogate pair is a str in Python, and no text in any file.
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"metric {key!r} holds text that UTF-8 cannot: {error}") from None
    return text


def _extract_scalar(value: _Array, key: str) -> object:
    shape = tuple(value.shape)
    if math.prod(shape) != 1:
        raise ValueError(
            f"metric {key!r} is a {type(value).__name__} of shape {shape}; report() takes "
            "tensors of one element. Reduce it first, for example with .mean(), or write .tolist()"
        )
    # TensorFlow's tensors and Keras's variables have no item(), what their numpy() gives has.
    found: Any = value if hasattr(value, "item") else cast("Any", value).numpy()
    return found.item() if hasattr(found, "item") else found


def encode_non_finite(value: object) -> object:
    """Replace NaN and infinities by what JSON can hold. Everything else is returned as it is."""
    if type(value) is float and not math.isfinite(value):
        return {_FLOAT_TAG: repr(value)}
    if isinstance(value, dict):
        return {k: encode_non_finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [encode_non_finite(v) for v in value]
    return value


def decode_non_finite(value: object) -> object:
    """Undo `encode_non_finite`."""
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
    """List the names of metrics, nested keys joined, and which of them may have been meant."""
    names = sorted({name for metrics in reported for name in flatten(metrics)})
    if not names:
        return "There are no metrics."
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    listed = ", ".join(map(repr, names[:_MAX_LISTED]))
    meant = difflib.get_close_matches(missing_name, names, n=1)
    hint = f"; did you mean {meant[0]!r}?" if meant else "."
    return f"There are {listed}{more}{hint}"
