"""Move batches of any structure to the device, optionally prefetching on a CUDA stream."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch

K = TypeVar("K")


def move_to_device(batch: object, device: torch.device) -> Any:
    """Move every tensor in a batch to a device. Other values do not change.

    Traverses mappings, lists, tuples, named tuples, and dataclasses. An object with a method `to`,
    such as a `PackedSequence` or a tokenizer's `BatchEncoding`, is moved by that method instead.
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
    # Named tuples take their fields as arguments; tuples and lists take one iterable.
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
    """Convert a dict to the mapping type of the batch, if its constructor accepts a dict."""
    try:
        return type(batch)(values)  # type: ignore[call-arg]  # depends on the user's type
    except TypeError:
        return values


def iter_to_device(
    batches: Iterable[object], device: torch.device, *, prefetch: bool
) -> Iterator[Any]:
    """Yield batches on a device. With `prefetch` on CUDA, copy the next one during computation."""
    if prefetch and device.type == "cuda":
        return _prefetch(iter(batches), device)
    return (move_to_device(batch, device) for batch in batches)


def _prefetch(batches: Iterator[object], device: torch.device) -> Iterator[object]:
    """Copy each batch one batch ahead, on a separate stream.

    The copy stream first waits for all work that is queued so far, on previous batches. So the
    memory of a freed batch is not overwritten before the work on it has finished, whatever object
    contained it. `record_stream` would not work for tensors inside unknown objects.
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
        next_batch = fetch()
        yield batch
        batch = next_batch
