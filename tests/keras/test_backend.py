"""What is refused before anything is trained, and which rows each worker gets of a batch."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from drawbar.keras import KerasConfig, KerasTrainer, prepare_dataset, prepare_model
from drawbar.train import RunConfig, ScalingConfig, TrainingFailedError
from drawbar.train.testing import run_in_threads


@pytest.fixture
def keras() -> Any:
    """Keras in this very process."""
    return importlib.import_module("keras")


def test_a_backend_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="one of 'torch', 'jax', 'tensorflow' or None, found 'mx"):
        KerasTrainer(print, keras_backend="mxnet")  # type: ignore[arg-type]


def test_a_backend_that_is_not_installed_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "jax" else found(name)
    )
    with pytest.raises(ModuleNotFoundError, match=r'pip install "drawbar\[jax\]"'):
        KerasConfig("jax").preflight(ScalingConfig(num_workers=2))


@pytest.mark.usefixtures("keras")
def test_keras_with_another_backend_in_this_process_is_refused(run_config: RunConfig) -> None:
    here = ScalingConfig(num_workers=0)
    trainer = KerasTrainer(print, keras_backend="jax", scaling_config=here, run_config=run_config)
    with pytest.raises(TrainingFailedError, match="but Keras was imported with"):
        trainer.fit()


def test_a_model_must_be_compiled_and_built(keras: Any) -> None:
    with pytest.raises(ValueError, match="is not built; prepare_model takes one that has a keras"):
        prepare_model(keras.Sequential([keras.layers.Dense(1)]))
    with pytest.raises(ValueError, match="is not compiled"):
        prepare_model(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]))


def shared(prepare: Callable[[], Any], config: RunConfig) -> list[list[list[int]]]:
    """Give each rank's rows of each batch, of rows that are their own numbers."""

    def function() -> list[list[int]]:
        data = prepare()
        batches = data if isinstance(data, DataLoader) else (data[i] for i in range(len(data)))
        return [[int(row) for row in batch[0]] for batch in batches]

    result = run_in_threads(function, num_workers=2, run_config=config)
    return [list(each) for each in result.return_values]


@pytest.mark.usefixtures("keras")
def test_arrays_are_shared_batch_by_batch(run_config: RunConfig) -> None:
    x = np.arange(11)
    first, second = shared(lambda: prepare_dataset(x, x, batch_size=4), run_config)
    assert first == [[0, 2], [4, 6], [8, 10]]
    assert second == [[1, 3], [5, 7], [9]]


@pytest.mark.usefixtures("keras")
def test_an_order_is_that_of_all_ranks(run_config: RunConfig) -> None:
    x = np.arange(12)
    ranks = shared(lambda: prepare_dataset(x, x, batch_size=4, shuffle=True), run_config)
    rows = [row for rank in ranks for batch in rank for row in batch]
    assert sorted(rows) == list(range(12))
    assert rows != list(range(12))


@pytest.mark.usefixtures("keras")
def test_a_loaders_batches_are_shared(run_config: RunConfig) -> None:
    rows = TensorDataset(torch.arange(8), torch.arange(8))
    first, second = shared(lambda: prepare_dataset(DataLoader(rows, batch_size=4)), run_config)
    assert first == [[0, 2], [4, 6]]
    assert second == [[1, 3], [5, 7]]


@pytest.mark.usefixtures("keras")
def test_what_does_not_fit_together_is_refused(run_config: RunConfig) -> None:
    x = np.arange(8)
    cases = (
        (lambda: prepare_dataset(x, x, batch_size=1), "less than a row for each of 2 workers"),
        (lambda: prepare_dataset(x, x[:3]), r"different numbers of rows: \[3, 8\]"),
        (
            lambda: prepare_dataset(DataLoader(TensorDataset(torch.arange(8))), batch_size=4),
            "was given batches, a DataLoader",
        ),
    )
    for number, (prepare, told) in enumerate(cases):
        config = replace(run_config, name=f"run-{number}")
        assert all(re.search(told, text) for text in refusals(prepare, config))


def refusals(prepare: Callable[[], Any], config: RunConfig) -> list[str]:
    def function() -> str:
        with pytest.raises(ValueError, match=r"prepare_dataset|rows") as raised:
            prepare()
        return str(raised.value)

    return run_in_threads(function, num_workers=2, run_config=config).return_values
