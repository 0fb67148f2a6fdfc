"""Private APIs of Accelerate: tests fail when Accelerate changes what `_compat` uses.

The tests that create Accelerate's state outside a training function are here, too.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType
from torch.utils.data import DataLoader

from drawbar.accelerate import launch, load_state
from drawbar.accelerate._compat import declare_gpus, get_prepared_loaders
from drawbar.torch._compat import get_accelerate_states
from drawbar.train import RunConfig, ScalingConfig


@pytest.fixture(autouse=True)
def clear_states() -> Iterator[None]:
    yield
    for state in get_accelerate_states():
        state.clear()


def test_accelerate_states_are_shared_dicts_of_singletons() -> None:
    PartialState(cpu=True)
    GradientState()
    partial, accelerator, gradient = get_accelerate_states()
    assert partial["device"] == PartialState().device
    assert accelerator == {}
    assert gradient["sync_gradients"] is True


def test_declared_gpus_are_in_new_state() -> None:
    declare_gpus(is_cpu_requested=True)
    assert PartialState().distributed_type == DistributedType.MULTI_GPU


def test_prepared_loaders_are_in_order_and_count_epochs() -> None:
    accelerator = Accelerator(cpu=True)
    loaders: list[DataLoader[int]] = [DataLoader(range(size)) for size in (3, 2)]  # type: ignore[arg-type]
    prepared = list(accelerator.prepare(*loaders))
    assert get_prepared_loaders(accelerator) == prepared
    assert [len(list(loader)) for loader in prepared] == [3, 2]
    assert [loader.iteration for loader in prepared] == [1, 1]


def test_accelerate_state_of_user_process_is_restored(
    run_config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def function() -> str:
        del os.environ["ACCELERATE_MIXED_PRECISION"]
        return str(Accelerator(cpu=True).mixed_precision)

    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    own = Accelerator(cpu=True)
    result = launch(function, (), ScalingConfig(num_workers=0), run_config=run_config)
    assert result.return_value == "no"
    assert own.state.mixed_precision == AcceleratorState().mixed_precision == "bf16"
    assert os.environ["ACCELERATE_MIXED_PRECISION"] == "bf16"


def test_load_state_outside_training_function_raises() -> None:
    with pytest.raises(RuntimeError, match="inside a training function"):
        load_state(Accelerator(cpu=True))
