"""Tests of an `Accelerator()` in the training function: same results as torchrun, and resuming."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from drawbar import train
from drawbar.accelerate import check_accelerator, launch, load_state, report_state
from drawbar.torch import prepare_data_loader
from drawbar.train import FailureConfig, Result, RunConfig, ScalingConfig, WorkerGroupError

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import the tests

pytestmark = pytest.mark.usefixtures("ray_cluster")

TWO_WORKERS = ScalingConfig(num_workers=2)


def plain_script(digits: Any, batch_size: int = 16) -> tuple[int, list[float]]:
    """A script for `accelerate launch`, with nothing of Drawbar in it."""
    import torch
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, set_seed

    set_seed(0)
    seedable = DataLoaderConfiguration(use_seedable_sampler=True)
    accelerator = Accelerator(dataloader_config=seedable)
    network = digits.network()
    model, optimizer, loader = accelerator.prepare(
        network, torch.optim.Adam(network.parameters()), digits.loader(batch_size)
    )
    losses = [digits.step(accelerator, model, optimizer, x, y) for x, y in loader]
    return accelerator.process_index, losses


def resumable(digits: Any, die_at: int | None = None) -> dict[str, Any]:
    """Two epochs of 20 steps with a checkpoint every seven; perhaps a kill of rank 1."""
    import torch
    from accelerate import Accelerator
    from accelerate.state import is_initialized

    context = train.get_context()
    context.cache.setdefault("pid", os.getpid())
    leaked = is_initialized()
    torch.manual_seed(0)
    accelerator = check_accelerator(Accelerator())
    loader = prepare_data_loader(digits.loader())
    network = digits.network(dropout=0.1)
    model, optimizer = accelerator.prepare(network, torch.optim.Adam(network.parameters()))
    begin = load_state(accelerator) or {"step": 0, "losses": [], "epoch": 0}
    step, losses = begin["step"], begin["losses"]
    for epoch in range(begin["epoch"], 2):
        for x, y in loader:
            losses.append(digits.step(accelerator, model, optimizer, x, y))
            step += 1
            if step % 7 == 0:
                report_state(accelerator, {"step": step, "losses": losses, "epoch": epoch})
            if (context.get_attempt(), context.get_world_rank(), step) == (0, 1, die_at):
                os.kill(os.getpid(), signal.SIGKILL)
    kept = context.get_attempt() == 1 and "kept" in context.cache
    return {"losses": losses, "leaked": leaked, "attempt": context.get_attempt(), "kept": kept}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("accelerate")


@pytest.fixture(scope="module")
def whole(ray_cluster: None, digits: Any, folder: Path) -> Result:
    """A plain script, and after it the one that nothing interrupts."""

    def function() -> Any:
        return plain_script(digits), resumable(digits)

    config = RunConfig(name="whole", storage_path=folder)
    return launch(function, (), TWO_WORKERS, run_config=config)


@pytest.fixture(scope="module")
def killed(ray_cluster: None, digits: Any, folder: Path) -> Result:
    once = FailureConfig(max_failures=1)
    config = RunConfig(name="killed", storage_path=folder, failure_config=once)
    return launch(resumable, (digits, 33), TWO_WORKERS, run_config=config)


@pytest.fixture(scope="module")
def under_torchrun(digits: Any, killed: Result, torchrun: Callable[..., Any]) -> Any:
    """The losses of the plain script, and what Accelerate has loaded of the killed run's state."""
    assert killed.checkpoint is not None
    path = killed.checkpoint.path

    def function() -> Any:
        import torch
        from accelerate import Accelerator

        _, losses = plain_script(digits)
        accelerator = Accelerator()
        model = digits.network()
        fresh = model[0].weight.detach().clone()
        model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters()))
        accelerator.load_state(path)
        loaded = accelerator.unwrap_model(model)[0].weight
        return losses, bool((loaded != fresh).any()), len(optimizer.state_dict()["state"])

    return torchrun(function)


def test_unchanged_script_has_losses_of_torchrun(
    digits: Any, under_torchrun: Any, whole: Result, run_config: RunConfig
) -> None:
    expected, *_ = under_torchrun
    assert len(expected) == 20
    assert expected[-1] < expected[0]
    for rank, ((process, losses), _) in enumerate(whole.return_values):
        assert process == rank
        assert losses == pytest.approx(expected, abs=1e-5)
    here = ScalingConfig(num_workers=0)
    _, alone = launch(plain_script, (digits, 32), here, run_config=run_config).return_value
    assert alone == pytest.approx(expected, abs=1e-5)


def test_state_after_kill_has_losses_of_uninterrupted_run(whole: Result, killed: Result) -> None:
    _, uninterrupted = whole.return_value
    expected = uninterrupted["losses"]
    assert len(expected) == 40
    for value in killed.return_values:
        assert value["attempt"] == 1
        assert not value["leaked"]
        assert value["losses"] == pytest.approx(expected, abs=1e-6)


def test_reported_state_loads_in_plain_accelerate(under_torchrun: Any) -> None:
    _, weights_loaded, parameters_in_optimizer = under_torchrun
    assert weights_loaded
    assert parameters_in_optimizer == 4


def test_partial_state_with_other_ranks_raises(run_config: RunConfig) -> None:
    def function() -> None:
        from accelerate import Accelerator, PartialState

        PartialState()  # on CPUs, it takes the process for the only one
        check_accelerator(Accelerator())

    with pytest.raises(WorkerGroupError, match=r"rank 0 of 1, but this worker has rank \d of 2"):
        launch(function, (), TWO_WORKERS, run_config=run_config)
