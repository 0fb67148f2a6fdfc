"""Find the tensors in nested values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch


def iter_tensors(value: object) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested dicts and lists."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from iter_tensors(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from iter_tensors(each)
