"""Find weights that change between the capture of a state and the next optimizer step.

A captured state does not copy weights, because only a step changes most of them. Momentum encoders
and averages of weights are exceptions: some modules update them in the forward pass.
"""

from __future__ import annotations

from collections import defaultdict
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

    A mark of a parameter without gradients, or of an average, contains some of its elements: a
    change of `param.data` does not change the version of the parameter.
    """

    def __init__(self) -> None:
        self._sampler_of_frozen, self._sampler_of_averages = _Sampler(), _Sampler()
        self._frozen: dict[Any, object] = {}
        self._others: object = None
        self._changing: set[Key] = set()

    def capture(self, models: Iterable[nn.Module], averages: object) -> dict[Key, torch.Tensor]:
        """Mark the weights, and return copies of those that change without gradients.

        They are known after their first change.

        Args:
            models: The models.
            averages: States of averages of weights.
        """
        trained, frozen = _split(models)
        previous, self._frozen = self._frozen, self._sampler_of_frozen.mark(frozen)
        self._changing |= {
            key for key in frozen if previous.get(key, self._frozen[key]) != self._frozen[key]
        }
        self._others = self._mark_others(trained, averages)
        return {
            key: param.detach().clone() for key, param in frozen.items() if key in self._changing
        }

    def is_unchanged(self, models: Iterable[nn.Module], averages: object) -> bool:
        """Return whether all weights are as in the latest `capture`, apart from its copies."""
        trained, frozen = _split(models)
        marks = self._sampler_of_frozen.mark(frozen)
        return self._others == self._mark_others(trained, averages) and all(
            marks.get(key) == mark
            for key, mark in self._frozen.items()
            if key not in self._changing
        )

    def _mark_others(self, trained: Iterable[nn.Parameter], averages: object) -> object:
        places = [(get_version(param), param.data_ptr()) for param in trained]
        return places, self._sampler_of_averages.mark(dict(enumerate(iter_tensors(averages))))


class _Sampler:
    """Marks tensors by their version and some of their elements.

    It keeps views of these elements, so that one operation reads them for all tensors of a dtype.
    """

    def __init__(self) -> None:
        self._views: dict[Any, tuple[int, torch.Tensor]] = {}

    def mark(self, tensors: Mapping[Any, torch.Tensor]) -> dict[Any, object]:
        """Return the mark of each tensor, by its key."""
        groups: dict[torch.dtype, list[Any]] = defaultdict(list)
        for key, tensor in tensors.items():
            address, _ = self._views.get(key, (None, None))
            if address != tensor.data_ptr():
                self._views[key] = tensor.data_ptr(), _view_sample(tensor)
            groups[tensor.dtype].append(key)
        marks: dict[Any, object] = {}
        for keys in groups.values():
            views = [self._views[key][1] for key in keys]
            data = torch.cat(views).view(torch.uint8).numpy().tobytes()
            start = 0
            for key, view in zip(keys, views, strict=True):
                marks[key] = get_version(tensors[key]), data[start : start + view.nbytes]
                start += view.nbytes
        return marks


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


def _view_sample(tensor: torch.Tensor) -> torch.Tensor:
    values = tensor.detach()
    # A flat view is impossible if the elements are not contiguous. A row is then enough.
    flat = values.view(-1) if values.is_contiguous() else values[(0,) * (values.dim() - 1)]
    return flat[:: max(1, len(flat) // _NUM_SAMPLES)]
