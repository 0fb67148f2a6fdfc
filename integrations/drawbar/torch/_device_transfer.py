"""Batches on their way to the device, of whatever shape the user's collate function makes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

K = TypeVar("K")


def move_to_device(batch: object, device: torch.device) -> Any:
    """Move every tensor in a batch to a device; what is not a tensor stays.

    Looks into mappings, lists, tuples, named tuples and dataclasses. Any other object that has a
    method `to`, such as a `PackedSequence` or a tokenizer's `BatchEncoding`, is moved by it.
    """
    if isinstance(batch, torch.Tensor):
        return batch.to(device, non_blocking=True)
    if hasattr(batch, "to"):
        moved = batch.to(device)
        return batch if moved is None else moved  # some objects move in place
    if isinstance(batch, Mapping):
        return _same_mapping_type(
            batch, {key: move_to_device(value, device) for key, value in batch.items()}
        )
    # A named tuple takes its fields one by one, where tuples and lists take an iterable.
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(move_to_device(value, device) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(move_to_device(value, device) for value in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        fields = [field.name for field in dataclasses.fields(batch) if field.init]
        return dataclasses.replace(
            batch, **{f: move_to_device(getattr(batch, f), device) for f in fields}
        )
    return batch


def _same_mapping_type(batch: Mapping[K, object], values: dict[K, object]) -> object:
    """Give the same kind of mapping where it can be made from a dict, otherwise a dict."""
    try:
        return type(batch)(values)  # type: ignore[call-arg]  # as each user's own type takes it
    except TypeError:
        return values


def iter_to_device(
    batches: Iterable[object], device: torch.device, *, prefetch: bool
) -> Iterator[Any]:
    """Give batches moved to a device; with `ahead`, on CUDA, the next during the work on this."""
    if prefetch and device.type == "cuda":
        return _prefetch(iter(batches), device)
    return (move_to_device(batch, device) for batch in batches)


def _prefetch(batches: Iterator[object], device: torch.device) -> Iterator[object]:
    """Copy each batch on a stream of its own, one batch ahead.

    The copying stream first waits for the work that is queued so far, that is, on the batches
    before. So the memory of a batch that was freed is not written again before the work on it is
    done, whatever kind of object held it; tensors inside an unknown object could not be told so by
    `record_stream`.
    """
    copying = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's is untyped
    end = object()

    def fetch() -> object:
        batch = next(batches, end)
        if batch is end:
            return end
        copying.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(copying):
            return move_to_device(batch, device)

    batch = fetch()
    while batch is not end:
        torch.cuda.current_stream(device).wait_stream(copying)
        following = fetch()
        yield batch
        batch = following
