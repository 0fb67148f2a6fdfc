"""Tests of _metrics: normalization and encoding of reported metrics."""

from __future__ import annotations

import enum
import math
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from drawbar.train._metrics import decode_non_finite, encode_non_finite, flatten, normalize


class Phase(str, enum.Enum):  # noqa: UP042  # as older code has it
    WARMUP = "warmup"


class Level(enum.IntEnum):
    HIGH = 3


def round_trip(metrics: Any) -> Any:
    """Encode and decode metrics as the journal does."""
    return decode_non_finite(
        msgspec.json.decode(msgspec.json.encode(encode_non_finite(normalize(metrics))))
    )


@pytest.mark.parametrize(
    ("reported", "kept"),
    [
        ({}, {}),
        ({"loss": 0.1, "epoch": 3, "name": "a", "done": True, "none": None}, None),
        ({"nested": {"a": {"b": [1, [2.5, {"c": None}]]}}}, None),
        ({"inf": math.inf, "minus": -math.inf, "zero": -0.0, "tiny": 5e-324}, None),
        ({"deep": {"list": [math.inf, {"x": -math.inf}]}}, None),
        ({"tuple": (1, 2)}, {"tuple": [1, 2]}),
        ({1: "a", None: "b"}, {"1": "a", "None": "b"}),
        ({"big": 2**70, "small": -(2**70)}, None),
        ({"text": 'äöü ∞ \x00 \\ " 🚂'}, None),
        ({"phase": Phase.WARMUP, "level": Level.HIGH}, {"phase": "warmup", "level": 3}),
        ({"f32": np.float32(0.5), "f64": np.float64(0.1)}, {"f32": 0.5, "f64": 0.1}),
        ({"i64": np.int64(7), "u8": np.uint8(255), "bool": np.bool_(True)}, None),
        ({"str": np.str_("a"), "0d": np.array(2.5), "1": np.array([[3]])}, None),
        ({"list": [np.float32(0.5), torch.tensor(1)]}, {"list": [0.5, 1]}),
        (
            {
                "t": torch.tensor(0.5),
                "one": torch.ones(1, 1),
                "grad": torch.ones(()).requires_grad_(),
            },
            None,
        ),
        ({"bf16": torch.tensor(1.5, dtype=torch.bfloat16), "int": torch.tensor(7)}, None),
        ({"like the tag": {"$float": "hello"}}, None),
        ({"like the tag": {"$float": 1}}, None),
        ({"$float": "x"}, None),
    ],
)
def test_metrics_round_trip_returns_plain_python_values(reported: Any, kept: Any) -> None:
    found = round_trip(reported)
    expected = kept if kept is not None else {key: _item(v) for key, v in reported.items()}
    assert found == expected
    assert [type(value) for value in found.values()] == [type(v) for v in expected.values()]


def _item(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


@pytest.mark.parametrize("value", [math.nan, np.float32("nan"), torch.tensor(math.nan)])
def test_metrics_round_trip_preserves_nan(value: Any) -> None:
    found = round_trip({"loss": value, "deep": {"losses": [value]}})
    assert math.isnan(found["loss"])
    assert math.isnan(found["deep"]["losses"][0])


def test_normalize_copies_mutable_values() -> None:
    history = [1]
    metrics = normalize({"history": history})
    history.append(2)
    assert metrics == {"history": [1]}


HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF["a"] = HOLDS_ITSELF


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        (0.5, TypeError, "takes a dict of metrics, found 0.5"),
        (None, TypeError, "takes a dict of metrics, found None"),
        ([("loss", 1)], TypeError, "takes a dict of metrics, found \\[\\('loss', 1\\)\\]"),
        (
            {"model": object()},
            TypeError,
            "metric 'model' is a builtins.object; report\\(\\) accepts",
        ),
        ({"a": {"b": [0, {1}]}}, TypeError, "metric 'a/b/1' is a builtins.set"),
        ({"z": 1j}, TypeError, "metric 'z' is a builtins.complex"),
        ({"z": np.complex64(1)}, TypeError, "metric 'z' is a builtins.complex"),
        ({"raw": b"x"}, TypeError, "metric 'raw' is a builtins.bytes"),
        ({"when": np.datetime64("2024-01-01")}, TypeError, "metric 'when' is a datetime.date"),
        ({"logits": torch.ones(2, 3)}, ValueError, r"'logits' is a Tensor of shape \(2, 3\).*mean"),
        ({"a": {"x": np.zeros(0)}}, ValueError, r"metric 'a/x' is a ndarray of shape \(0,\)"),
        (
            {"own": HOLDS_ITSELF},
            ValueError,
            "metric 'own' is nested too deeply, or contains itself",
        ),
        ({"text": "\ud800"}, ValueError, "metric 'text'"),
        ({"a": {"\udfff": 1}}, ValueError, "metric 'a/"),
    ],
)
def test_normalize_unsupported_value_raises_and_names_its_key(
    metrics: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        normalize(metrics)


@pytest.mark.parametrize(
    ("metrics", "flat"),
    [
        ({}, {}),
        ({"a": 1, "b": {"c": 2, "d": {"e": 3}}}, {"a": 1, "b/c": 2, "b/d/e": 3}),
        ({"a/b": 1, "list": [{"x": 1}]}, {"a/b": 1, "list": [{"x": 1}]}),
        ({"empty": {}}, {}),
    ],
)
def test_flatten_joins_nested_keys(metrics: dict[str, Any], flat: dict[str, Any]) -> None:
    assert flatten(metrics) == flat
