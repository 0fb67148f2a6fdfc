"""Find weights that change between the capture of a state and the next optimizer step.

A captured state does not copy weights, because only a step changes most of them. Momentum encoders
and averages of weights are exceptions: some modules update them in the forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from drawbar.torch._compat import get_version
from drawbar.torch._tensors import iter_tensors

_NUM_SAMPLES = 64

Key = tuple[int, str]
"""Number of a model, and name of a parameter in it."""


class WeightMarks:
    """Marks of the weights at the time of the latest `capture`.

    A mark of a parameter without gradients contains some of its elements, because a change of
    `param.data` does not change the version of the parameter.
    """

    def __init__(self) -> None:
        self._frozen: dict[Key, object] = {}
        self._others: list[object] = []
        self._changing: set[Key] = set()

    def capture(self, models: Iterable[nn.Module], averages: object) -> dict[Key, torch.Tensor]:
        """Mark the weights, and return copies of those that change without gradients.

        They are known after their first change.

        Args:
            models: The models.
            averages: States of averages of weights.
        """
        trained, frozen = _split(models)
        previous, self._frozen = self._frozen, _mark_each(frozen)
        self._changing |= {
            key for key, mark in self._frozen.items() if previous.get(key, mark) != mark
        }
        self._others = _mark_others(trained, averages)
        return {
            key: param.detach().clone() for key, param in frozen.items() if key in self._changing
        }

    def is_unchanged(self, models: Iterable[nn.Module], averages: object) -> bool:
        """Return whether all weights are as in the latest `capture`, apart from its copies."""
        trained, frozen = _split(models)
        marks = _mark_each(frozen)
        return self._others == _mark_others(trained, averages) and all(
            marks.get(key) == mark
            for key, mark in self._frozen.items()
            if key not in self._changing
        )


def _split(
    models: Iterable[nn.Module],
) -> tuple[list[nn.Parameter], dict[Key, nn.Parameter]]:
    """Return the parameters with and without gradients."""
    trained: list[nn.Parameter] = []
    frozen: dict[Key, nn.Parameter] = {}
    for number, model in enumerate(models):
        for name, param in model.named_parameters():
            if param.requires_grad:
                trained.append(param)
            else:
                frozen[number, name] = param
    return trained, frozen


def _mark_each(params: Mapping[Key, nn.Parameter]) -> dict[Key, object]:
    return {key: _mark(param) for key, param in params.items()}


def _mark_others(trained: Iterable[nn.Parameter], averages: object) -> list[object]:
    places: list[Any] = [(get_version(param), param.data_ptr()) for param in trained]
    return places + [_mark(tensor) for tensor in iter_tensors(averages)]


def _mark(tensor: torch.Tensor) -> object:
    values = tensor.detach().reshape(-1)
    sample = values[:: max(1, len(values) // _NUM_SAMPLES)].cpu().contiguous()
    return get_version(tensor), sample.view(torch.uint8).numpy().tobytes()
