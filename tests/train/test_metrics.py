"""Tests of reported metrics: normalization, storage, and flat names."""

from __future__ import annotations

import enum
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from drawbar import train
from drawbar.train.runs import RunRecord, find_run
from tests.train.runs import fit


class Phase(str, enum.Enum):  # noqa: UP042  # as older code has it
    WARMUP = "warmup"


class Level(enum.IntEnum):
    HIGH = 3


CASES: list[tuple[Any, Any]] = [
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
]
"""Reported metrics, and the stored ones if they are not those with `item()` of each value."""

NANS: list[Any] = [math.nan, np.float32("nan"), torch.tensor(math.nan)]

FLAT_CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {}),
    ({"a": 1, "b": {"c": 2, "d": {"e": 3}}}, {"a": 1, "b/c": 2, "b/d/e": 3}),
    ({"a/b": 1, "list": [{"x": 1}]}, {"a/b": 1, "list": [{"x": 1}]}),
    ({"empty": {}}, {}),
]


def report_all() -> None:
    for metrics, _ in FLAT_CASES:
        train.report(metrics)
    nans = [{"loss": value, "deep": {"losses": [value]}} for value in NANS]
    train.report({"cases": dict(enumerate(metrics for metrics, _ in CASES)), "nans": nans})


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunRecord:
    """Return a stored run that has reported all metrics."""
    path = tmp_path_factory.mktemp("storage")
    fit(report_all, path)
    return find_run(path / "run")


@pytest.mark.parametrize("number", range(len(CASES)))
def test_metrics_round_trip_returns_plain_python_values(run: RunRecord, number: int) -> None:
    assert run.metrics is not None
    found = run.metrics["cases"][str(number)]
    reported, kept = CASES[number]
    expected = kept if kept is not None else {key: _item(v) for key, v in reported.items()}
    assert found == expected
    assert [type(value) for value in found.values()] == [type(v) for v in expected.values()]


def _item(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


@pytest.mark.parametrize("number", range(len(NANS)))
def test_metrics_round_trip_preserves_nan(run: RunRecord, number: int) -> None:
    assert run.metrics is not None
    found = run.metrics["nans"][number]
    assert math.isnan(found["loss"])
    assert math.isnan(found["deep"]["losses"][0])


@pytest.mark.parametrize("number", range(len(FLAT_CASES)))
def test_report_rows_join_nested_keys(run: RunRecord, number: int) -> None:
    row = run.list_report_rows()[number]
    assert row.pop("index") == number
    for column in ("rank", "attempt", "time"):
        row.pop(column)
    assert row == FLAT_CASES[number][1]


def test_report_copies_mutable_values(tmp_path: Path) -> None:
    def function() -> None:
        history = [1]
        train.report({"history": history})
        history.append(2)

    assert fit(function, tmp_path).metrics == {"history": [1]}


HOLDS_ITSELF: dict[str, Any] = {}
HOLDS_ITSELF["a"] = HOLDS_ITSELF


UNSUPPORTED: list[tuple[Any, type[Exception], str]] = [
    (0.5, TypeError, "takes a dict of metrics, found 0.5"),
    (None, TypeError, "takes a dict of metrics, found None"),
    ([("loss", 1)], TypeError, "takes a dict of metrics, found \\[\\('loss', 1\\)\\]"),
    (
        {"model": object()},
        TypeError,
        "metric 'model' is a builtins.object; metrics can be",
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
]


def test_report_of_unsupported_metric_raises_and_names_its_key(tmp_path: Path) -> None:
    def function() -> None:
        for metrics, error, message in UNSUPPORTED:
            with pytest.raises(error, match=message):
                train.report(metrics)

    assert fit(function, tmp_path).metrics is None
