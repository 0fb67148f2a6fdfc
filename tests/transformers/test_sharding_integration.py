"""Tests of FSDP and DeepSpeed with the Trainer's arguments on CPU workers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from drawbar import train
from drawbar.train import Result, TrainingFailedError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

pytestmark = pytest.mark.usefixtures("ray_cluster")

SHARDS = {
    "fsdp": ["pytorch_model_fsdp_0/__0_0.distcp", "pytorch_model_fsdp_0/__1_0.distcp"],
    "zero2": [
        "global_step7/zero_pp_rank_0_mp_rank_00_optim_states.pt",
        "global_step7/zero_pp_rank_1_mp_rank_00_optim_states.pt",
    ],
    "zero3": [
        "global_step7/zero_pp_rank_0_mp_rank_00_model_states.pt",
        "global_step7/zero_pp_rank_1_mp_rank_00_model_states.pt",
    ],
}


def options(tiny: Any, kind: str) -> dict[str, Any]:
    return {
        **tiny.SHARDED.get(kind, {}),
        "max_steps": 10,
        "save_strategy": "steps",
        "save_steps": 7,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sharding")


@pytest.fixture(scope="module")
def expected(tiny: Any, runs: Any, folder: Path) -> dict[int, float]:
    """The losses of one process, which do not depend on how a model is sharded."""

    def trainer() -> Any:
        both = {"per_device_train_batch_size": 8, "max_steps": 10}
        return tiny.trainer(folder / "one-output", tiny.gpt(dropout=0), **both)

    losses: dict[int, float] = runs.losses_of_one_process(folder / "one", trainer)
    return losses


@pytest.fixture(
    scope="module",
    params=[pytest.param(kind, marks=pytest.mark.nightly) for kind in ("fsdp", "zero3", "zero2")],
)
def killed(
    request: pytest.FixtureRequest, ray_cluster: None, tiny: Any, runs: Any, folder: Path
) -> tuple[str, Result]:
    """Run that is killed after its first checkpoint and resumes from it."""
    kind: str = request.param

    def function() -> Any:
        model = tiny.gpt(dropout=0)
        trainer = tiny.trainer(folder / f"{kind}-output", model, **options(tiny, kind))
        trainer = runs.on_ray(trainer, die_at=9)
        trainer.train()
        sharding = trainer.accelerator.distributed_type.value
        if sharding == "DEEPSPEED":
            assert sys.modules["deepspeed.comm.comm"].cdb.shm_comm_op is None  # else compiled here
        return train.get_context().get_attempt(), sharding, tiny.losses(trainer)

    return kind, runs.fit(function, folder / kind)


def test_sharded_run_after_kill_has_losses_of_one_process(
    killed: tuple[str, Result], expected: dict[int, float]
) -> None:
    kind, result = killed
    for attempt, sharding, losses in result.return_values:
        assert attempt == 1
        assert sharding == ("FSDP" if kind == "fsdp" else "DEEPSPEED")
        assert losses == pytest.approx(expected, abs=1e-5)


def test_sharded_checkpoint_contains_shard_of_each_rank(killed: tuple[str, Result]) -> None:
    kind, result = killed
    checkpoint, metrics = result.best_checkpoints[0]
    assert metrics["step"] == 7
    for shard in SHARDS[kind]:
        assert (Path(checkpoint.path) / shard).stat().st_size > 1000


@pytest.mark.nightly
@pytest.mark.parametrize("killed", ["fsdp"], indirect=True)
def test_fsdp_resumes_on_other_world_size(killed: tuple[str, Result], resume: Any) -> None:
    assert sorted(resume(*killed)) == list(range(1, 11))


@pytest.mark.nightly
@pytest.mark.parametrize("killed", ["zero3"], indirect=True)
def test_zero_3_on_other_world_size_raises(killed: tuple[str, Result], resume: Any) -> None:
    with pytest.raises(TrainingFailedError, match="world size"):
        resume(*killed, num_workers=1)


@pytest.fixture
def resume(tiny: Any, runs: Any, folder: Path) -> Any:
    """Return a function that resumes from step 7 and returns the losses."""

    def resume(kind: str, result: Result, num_workers: int = 0) -> Any:
        begin = result.best_checkpoints[0][0].path
        output = folder / f"{kind}-resumed-output"

        def function() -> Any:
            saves = options(tiny, kind) | {"save_strategy": "no"}
            trainer = runs.on_ray(tiny.trainer(output, tiny.gpt(dropout=0), **saves))
            trainer.train(resume_from_checkpoint=begin)
            return tiny.losses(trainer)

        path = folder / f"{kind}-resumed"
        return runs.fit(function, path, num_workers, max_failures=0).return_value

    return resume
