"""Reported metrics: what is taken, and how they are written so that nothing changes on the way.

JSON has no NaN and no infinity; a score that silently becomes null breaks ranking later. So they
are written as `{"$float": "nan"}`, and come back as the floats they were.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, cast

_PLAIN = (float, bool, int, type(None))
_TAG = "$float"
_NOT_FINITE = ("nan", "inf", "-inf")
_LISTED = 20


Metrics = dict[str, Any]
"""Reported metrics: what JSON can hold, NaN and infinity too. Users compute with the values."""


class _Array(Protocol):
    """A NumPy scalar, an array or a tensor."""

    @property
    def shape(self) -> Iterable[int]: ...


def normalise(metrics: object) -> Metrics:
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
    return {_text(str(key), key): _outermost(value, str(key)) for key, value in metrics.items()}


def _outermost(value: object, key: str) -> object:
    try:
        return _plain(value, key)
    except RecursionError:
        raise ValueError(
            f"metric {key!r} is nested too deeply, or holds itself; report() takes what JSON can "
            "hold. Put larger objects into a checkpoint"
        ) from None


def _plain(value: object, key: str) -> object:
    # Nearly all metrics are: the rest is not looked at for these.
    if type(value) in _PLAIN:
        return value
    if isinstance(value, str):
        return _text(str.__str__(value), key)  # an enum's own __str__ gives its name
    if isinstance(value, Mapping):
        return {_text(str(k), f"{key}/{k}"): _plain(v, f"{key}/{k}") for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, f"{key}/{i}") for i, v in enumerate(value)]
    if hasattr(value, "shape") and (hasattr(value, "item") or hasattr(value, "numpy")):
        return _plain(_scalar(cast("_Array", value), key), key)
    if isinstance(value, int | float):  # enums and other subclasses
        return int(value) if isinstance(value, int) else float(value)
    raise TypeError(
        f"metric {key!r} is a {type(value).__module__}.{type(value).__qualname__}; report() takes "
        "numbers, strings, booleans, None, lists and dicts of them, and tensors of one element. "
        "Put larger objects into a checkpoint"
    )


def _text(text: str, key: object) -> str:
    try:
        # Half of a surrogate pair is a str in Python, and no text in any file.
        text.isascii() or text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"metric {key!r} holds text that UTF-8 cannot: {error}") from None
    return text


def _scalar(value: _Array, key: str) -> object:
    shape = tuple(value.shape)
    if math.prod(shape) != 1:
        raise ValueError(
            f"metric {key!r} is a {type(value).__name__} of shape {shape}; report() takes "
            "tensors of one element. Reduce it first, for example with .mean(), or write .tolist()"
        )
    # TensorFlow's tensors and Keras's variables have no item(), what their numpy() gives has.
    found: Any = value if hasattr(value, "item") else cast("Any", value).numpy()
    return found.item() if hasattr(found, "item") else found


def to_json(value: object) -> object:
    """Replace NaN and infinities by what JSON can hold. Everything else is returned as it is."""
    if type(value) is float and not math.isfinite(value):
        return {_TAG: repr(value)}
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    if isinstance(value, list):
        return [to_json(v) for v in value]
    return value


def from_json(value: object) -> object:
    """Undo `to_json`."""
    if isinstance(value, dict):
        if len(value) == 1 and value.get(_TAG) in _NOT_FINITE:
            return float(value[_TAG])
        return {k: from_json(v) for k, v in value.items()}
    if isinstance(value, list):
        return [from_json(v) for v in value]
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


def metrics_there_are(reported: Iterable[Mapping[str, object]], *, instead_of: str) -> str:
    """List the names of metrics, nested keys joined, and which of them may have been meant."""
    names = sorted({name for metrics in reported for name in flatten(metrics)})
    if not names:
        return "There are no metrics."
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    listed = ", ".join(map(repr, names[:_LISTED]))
    meant = difflib.get_close_matches(instead_of, names, n=1)
    hint = f"; did you mean {meant[0]!r}?" if meant else "."
    return f"There are {listed}{more}{hint}"
