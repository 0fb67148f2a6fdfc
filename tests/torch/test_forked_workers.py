"""Workers forked from a server that has imported frameworks equal fresh workers."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from drawbar.torch import TorchTrainer
from drawbar.train import RunConfig, ScalingConfig

pytestmark = pytest.mark.usefixtures("ray_cluster")

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

MODULES = [
    *("torch", "lightning.pytorch", "transformers.trainer", "accelerate"),
    *("xgboost", "lightgbm", "sklearn.linear_model", "pandas"),
]


@pytest.fixture(autouse=True)
def _learn_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start fork servers as in a program of a user."""
    monkeypatch.delenv("DRAWBAR_FORKSERVER_PRELOAD")


def use_every_framework() -> dict[str, Any]:
    """Return results, numbers of threads, and seeds of this process."""
    is_preloaded = all(name in sys.modules for name in MODULES)
    import numpy as np
    import torch
    from threadpoolctl import threadpool_info

    seeds = torch.initial_seed(), np.random.randint(2**62)
    torch.manual_seed(1)
    data = torch.randn(64, 32)
    state: dict[str, Any] = {
        "torch": (data.repeat(20, 1) @ data.T).sum().item(),  # large enough for several threads
        "loader": _sum_in_loader_workers(data),
        **_train_neural_networks(data),
        **_train_other_models(data.numpy(), (data.sum(1) > 0).numpy().astype(np.int32)),
        "threads": (torch.get_num_threads(), torch.get_num_interop_threads()),
        "environment": {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", "RANK")},
    }
    state["pools"] = sorted(
        (pool["internal_api"], Path(pool["filepath"]).name, pool["num_threads"])
        for pool in threadpool_info()
    )
    return {"is_preloaded": is_preloaded, "seeds": seeds, "state": state}


def _sum_in_loader_workers(data: Any) -> float:
    import torch

    loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2)
    return sum(float(batch.sum()) for batch in loader)


def _train_neural_networks(data: Any) -> dict[str, float]:
    import lightning.pytorch as pl
    import torch
    import transformers
    from accelerate import Accelerator
    from lightning.fabric.plugins.environments.lightning import LightningEnvironment
    from lightning.pytorch.demos.boring_classes import BoringModel

    trainer = pl.Trainer(
        accelerator="cpu", devices=1, max_steps=3, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, limit_val_batches=0,
        plugins=[LightningEnvironment()],
    )  # fmt: skip
    trainer.fit(model := BoringModel())
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=16)
    tokens = torch.arange(16).reshape(2, 8)
    linear = Accelerator(cpu=True).prepare(torch.nn.Linear(32, 1))
    return {
        "lightning": model.layer.weight.sum().item(),
        "transformers": transformers.GPT2LMHeadModel(config)(tokens, labels=tokens).loss.item(),
        "accelerate": linear(data).sum().item(),
    }


def _train_other_models(rows: Any, labels: Any) -> dict[str, float]:
    import lightgbm
    import xgboost
    from sklearn.linear_model import LogisticRegression

    boosting = {"nthread": 2, "seed": 1, "subsample": 0.5}
    booster = xgboost.train(boosting, xgboost.DMatrix(rows, labels), 3)
    light: dict[str, Any] = {"num_threads": 2, "min_data_in_leaf": 2, "verbose": -1}
    light_booster: Any = lightgbm.train(light, lightgbm.Dataset(rows, labels), 3)
    return {
        "xgboost": float(booster.predict(xgboost.DMatrix(rows)).sum()),
        "lightgbm": float(light_booster.predict(rows).sum()),
        "sklearn": float(LogisticRegression().fit(rows, labels).coef_.sum()),
    }


@pytest.mark.nightly
def test_results_and_threads_of_forked_workers_equal_fresh_ones(tmp_path: Path) -> None:
    results = []
    for name, modules in (("fresh", []), ("forked", MODULES)):
        trainer = TorchTrainer(
            use_every_framework,
            scaling_config=ScalingConfig(num_workers=2),
            run_config=RunConfig(name=name, storage_path=tmp_path, forkserver_preload=modules),
        )
        results.append(trainer.fit().return_values)
    fresh, forked = results
    assert fresh is not None
    assert forked is not None
    assert [[rank["is_preloaded"] for rank in ranks] for ranks in results] == [
        [False, False],
        [True, True],
    ]
    for before, after in zip(fresh, forked, strict=True):
        assert after["state"] == before["state"]
    assert len({seed for rank in fresh + forked for seed in rank["seeds"]}) == 8
