"""Tests of drawbar.torch._device_transfer. The meta device replaces a device other than the CPU."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from drawbar.torch._device_transfer import iter_to_device, move_to_device

META = torch.device("meta")


class Pair(NamedTuple):
    x: torch.Tensor
    y: str


@dataclass(frozen=True)
class Sample:
    x: torch.Tensor
    name: str


class Encoding(UserDict[str, torch.Tensor]):
    """Moves in place and gives nothing back."""

    def to(self, device: torch.device) -> None:
        self.data = {key: value.to(device) for key, value in self.data.items()}


@pytest.mark.parametrize(
    ("batch", "tensor"),
    [
        ((torch.ones(1), "label"), lambda moved: moved[0]),
        ([torch.ones(1)], lambda moved: moved[0]),
        ({"a": {"b": torch.ones(1)}}, lambda moved: moved["a"]["b"]),
        (OrderedDict(a=torch.ones(1)), lambda moved: moved["a"]),
        (Pair(torch.ones(1), "label"), lambda moved: moved.x),
        (Sample(torch.ones(1), "label"), lambda moved: moved.x),
        (Encoding(a=torch.ones(1)), lambda moved: moved["a"]),
        (
            torch.nn.utils.rnn.pack_padded_sequence(torch.ones(2, 1, 1), torch.tensor([2])),
            lambda moved: moved.data,
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_move_to_device_moves_tensors_in_structures(batch: Any, tensor: Any) -> None:
    there = move_to_device(batch, META)
    assert type(there) is type(batch)
    assert tensor(there).device == META


def test_move_to_device_keeps_other_values() -> None:
    batch = {"a": ["text", 1, None], "b": range(3)}
    assert move_to_device(batch, META) == batch


def test_iter_to_device_moves_all_batches_including_none() -> None:
    batches = list(iter_to_device([torch.ones(1), None, torch.ones(1)], META, prefetch=True))
    assert batches[1] is None
    assert batches[0].device == batches[2].device == META
