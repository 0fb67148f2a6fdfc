"""Private APIs of Accelerate: each test fails when Accelerate changes what `_compat` uses."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import GradientState, PartialState
from accelerate.utils import DistributedType

from drawbar.accelerate._compat import declare_gpus
from drawbar.torch._compat import get_accelerate_states


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
