"""Strategies on two workers yield the results of plain Lightning."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from drawbar.lightning import (
    RayDDPStrategy,
    RayDeepSpeedStrategy,
    RayFSDPStrategy,
    RayLightningEnvironment,
    RayModelParallelStrategy,
    prepare_trainer,
)
from drawbar.torch import TorchTrainer
from drawbar.train import FailureConfig, Result, RunConfig, ScalingConfig, get_context

pytestmark = pytest.mark.filterwarnings(  # Lightning's
    "ignore::UserWarning", "ignore::FutureWarning"
)

TWO = ScalingConfig(num_workers=2)
STRATEGIES: dict[str, Any] = {
    "ddp": RayDDPStrategy,
    "fsdp": RayFSDPStrategy,
    "model_parallel": lambda: RayModelParallelStrategy(data_parallel_size=2),
    "zero_1": lambda: RayDeepSpeedStrategy(stage=1),
    "zero_2": lambda: RayDeepSpeedStrategy(stage=2),
    "zero_3": lambda: RayDeepSpeedStrategy(stage=3),
}


@pytest.fixture(scope="module")
def run(ray_cluster: None, plain: Any, tmp_path_factory: pytest.TempPathFactory) -> Result:
    """A run in which the strategies follow each other, and one of many arguments comes last."""
    folder = tmp_path_factory.mktemp("runs")

    def function() -> tuple[dict[str, float], dict[str, Any], dict[str, Any]]:
        import lightning as L

        weights: dict[str, dict[str, torch.Tensor]] = {}

        class CollectWeights(L.Callback):
            def on_train_end(self, trainer: Any, *args: Any) -> None:
                gathered = trainer.strategy.full_state_dict()
                if trainer.is_global_zero:
                    weights[name] = {key: value.detach().cpu() for key, value in gathered.items()}

        losses = {}
        for name, make in STRATEGIES.items():
            losses[name] = plain.last_loss(make(), 2, callbacks=[CollectWeights()])
        return losses, with_arguments(plain, folder / "full.ckpt"), weights

    config = RunConfig(name="run", storage_path=folder)
    return TorchTrainer(function, scaling_config=TWO, run_config=config).fit()


@pytest.fixture(scope="module")
def trained(run: Result) -> dict[str, float]:
    """The last loss of each strategy."""
    (rank_0, *_), (rank_1, *_) = run.return_values
    assert rank_0 == pytest.approx(rank_1)
    losses: dict[str, float] = rank_0
    return losses


@pytest.fixture(scope="module")
def alone(plain: Any) -> float:
    """The last loss of plain Lightning in one process, with the batches of two together."""
    loss: float = plain.last_loss("auto", 1, devices=1)
    return loss


def plain_lightning(launcher: list[str], *arguments: str) -> dict[str, float]:
    command = [*launcher, str(Path(__file__).parent / "plain_digits.py"), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    output = subprocess.run(
        command,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ).stdout
    return {name: float(loss) for name, loss in re.findall(r"^(\w+) ([\d.e-]+)$", output, re.M)}


@pytest.mark.parametrize("name", STRATEGIES)
def test_strategies_match_single_process(
    trained: dict[str, float], alone: float, name: str
) -> None:
    assert trained[name] == pytest.approx(alone, abs=1e-5)


def test_full_state_dict_of_sharded_model_has_all_weights(run: Result) -> None:
    *_, weights = run.return_values[0]
    for gathered in weights.values():
        assert gathered.keys() == weights["ddp"].keys()
        for name, value in weights["ddp"].items():
            torch.testing.assert_close(gathered[name], value, atol=1e-4, rtol=0)


@pytest.mark.nightly
def test_strategies_match_torchrun(trained: dict[str, float]) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    plain = plain_lightning(torchrun, "2", "ddp", "model_parallel")
    found = {name: trained[name] for name in ("ddp", "model_parallel")}
    assert found == pytest.approx(plain, abs=1e-5)


def with_arguments(plain: Any, path: Path) -> dict[str, Any]:
    """Train with a strategy of many arguments and return their values on this rank."""
    import lightning as L

    strategy: Any = RayFSDPStrategy(
        sharding_strategy="HYBRID_SHARD", device_mesh=(1, 2), auto_wrap_policy={torch.nn.Linear}
    )
    environment: Any = RayLightningEnvironment()
    trainer: Any = L.Trainer(
        devices=7,  # ignored by the strategy
        num_nodes=3,
        accelerator="cpu",
        strategy=strategy,
        plugins=[environment],
        max_steps=2,
        enable_checkpointing=False,
        **plain.QUIET,
    )
    prepare_trainer(trainer).fit(plain.Digits(), plain.DigitsData(2))
    trainer.save_checkpoint(path)  # the whole state, which torch's FSDP cannot gather on CPUs
    sampler = trainer.train_dataloader.sampler
    return {
        "mesh": strategy.kwargs["device_mesh"].shape,
        "wrapped": str(strategy.model).count("FullyShardedDataParallel"),
        "sampler": (sampler.num_replicas, sampler.rank),
        "ranks": (trainer.world_size, trainer.global_rank, trainer.local_rank),
        "devices": trainer.num_devices,
        "keys": sorted(torch.load(path, weights_only=False)["state_dict"]),
    }


def test_strategy_passes_arguments_to_lightning(run: Result) -> None:
    expected = {
        "mesh": (1, 2),
        "wrapped": 3,  # the module and its two layers
        "devices": 2,
        "keys": ["net.0.bias", "net.0.weight", "net.2.bias", "net.2.weight"],
    }
    for rank, (_, found, _) in enumerate(run.return_values):
        assert found == {**expected, "sampler": (2, rank), "ranks": (2, rank, rank)}


@pytest.mark.usefixtures("ray_cluster", "patient_restarts")
@pytest.mark.nightly
def test_deepspeed_in_reused_process_trains_again(
    plain: Any, run_config: RunConfig, alone: float
) -> None:
    def function() -> dict[str, Any]:
        import lightning as L

        context = get_context()
        kept = context.cache.setdefault("pid", os.getpid()) == os.getpid()
        kept = kept and context.cache.setdefault("attempt", context.get_attempt()) == 0

        class Die(L.Callback):
            def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
                dies = context.get_attempt() == 0 and context.get_world_rank() == 1
                if dies and trainer.global_step == 3:
                    os.kill(os.getpid(), signal.SIGKILL)

        before = {
            key for key in os.environ if not key.startswith("KMP_")
        }  # Intel's OpenMP sets those
        loss = plain.last_loss(RayDeepSpeedStrategy(stage=3), 2, callbacks=[Die()])
        left = {key for key in os.environ if not key.startswith("KMP_")} - before
        return {"kept": kept, "loss": loss, "left": left}

    failures = FailureConfig(max_failures=1)
    config = RunConfig(name="run", storage_path=run_config.storage_path, failure_config=failures)
    result: Result = TorchTrainer(function, scaling_config=TWO, run_config=config).fit()
    for value in result.return_values:
        assert value["loss"] == pytest.approx(alone, abs=1e-5)
        assert value["left"] == set()
    assert [value["kept"] for value in result.return_values] == [True, False]
