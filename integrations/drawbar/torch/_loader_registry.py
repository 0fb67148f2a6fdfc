"""Identify data loaders, within an attempt and in the next one.

Training functions prepare loaders once, or once per epoch. A loader that is prepared where another
one was prepared and iterated before continues its epochs. Loaders with a name are identified by the
name. Other loaders are identified by the call location that prepares them, their dataset,
and their number among the loaders that are prepared there before one of them is iterated.
"""

from __future__ import annotations

import sys
import warnings
import weakref
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Set
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any, TypeVar

from torch.utils.data import IterableDataset

from drawbar.torch._data_position import PositionTracker
from drawbar.train import get_context
from drawbar.train.backend import attempt_local, register_data_position

T = TypeVar("T")


@dataclass(frozen=True)
class LoaderIdentity:
    """Identity of a loader without a name.

    Args:
        location: Checksum of the calls that lead to `prepare_data_loader`.
        dataset: Type and length of the dataset.
        ordinal: Number among the loaders that are prepared at that location for a dataset of that
            type and length, before one of them is iterated.
    """

    location: str
    dataset: str
    ordinal: int = 0


class TrackedLoader:
    """A prepared loader whose epochs are tracked; its position belongs to a slot once it is used.

    Args:
        registry: The registry of this rank.
        counter: Counts the batches of the loader.
        name: Name of the loader; None to identify it by `identity`.
        identity: Identity of the loader.
        is_recorded: Whether checkpoints contain the position.
    """

    def __init__(
        self,
        registry: LoaderRegistry,
        counter: PositionTracker,
        name: str | None,
        identity: LoaderIdentity,
        *,
        is_recorded: bool,
    ) -> None:
        self.counter = counter
        self.name = name
        self.identity = identity
        self.is_recorded = is_recorded
        self.prepared_at = registry.tick()
        self._registry = registry
        self._slot: Slot | None = None

    def begin(self) -> None:
        """Begin an iteration where the slot's newest iteration or the checkpoint ends.

        Raises:
            ValueError: Several positions in the checkpoint may belong to this loader.
        """
        slot = self._slot or self._registry.find_slot(self)
        if slot.counter is None:
            if slot.recorded is not None:
                self.counter.resume_from(slot.recorded)
        elif slot.counter is not self.counter:
            self.counter.follow(slot.counter)
        slot.counter, slot.begun_at = self.counter, self._registry.tick()
        self._slot = slot
        self.counter.start_epoch()

    def count(self, batches: Iterator[T]) -> Iterator[T]:
        """Yield the batches of the iteration."""
        return self.counter.track(batches)


@dataclass
class Slot:
    """A sequence of epochs, of one loader or of several that replace each other.

    Args:
        key: Key in the checkpoint; None if checkpoints do not contain the position.
        name: Name of the loaders, if they have one.
        identity: Identity of the loaders.
        recorded: State in the checkpoint that this attempt resumes from.
        counter: Counter of the newest loader that was iterated.
        begun_at: Time of the newest iteration's begin, in ticks of the registry.
    """

    key: str | None
    name: str | None
    identity: LoaderIdentity
    recorded: object = None
    counter: PositionTracker | None = None
    begun_at: int = 0

    def matches(self, loader: TrackedLoader, *, by_ordinal: bool) -> bool:
        """Return whether a loader may take over this slot."""
        if self.name is not None or loader.name is not None:
            return self.name == loader.name
        ours, theirs = self.identity, loader.identity
        is_later = self.begun_at < loader.prepared_at
        is_same = ours.location == theirs.location and ours.dataset == theirs.dataset
        return is_later and is_same and (not by_ordinal or ours.ordinal == theirs.ordinal)


class LoaderRegistry:
    """The loaders of one rank in one attempt. Use `attempt_local(LoaderRegistry)`."""

    def __init__(self) -> None:
        self._rank = get_context().get_world_rank()
        self._time = 0
        self._slots: list[Slot] = []
        self._prepared: set[LoaderIdentity] = set()
        # Loaders of one place and dataset, since the last one of them was iterated.
        self._waiting = defaultdict[LoaderIdentity, list[weakref.ref[TrackedLoader]]](list)
        recorded = register_data_position("data_loaders", self.record)
        # A copy, since ranks in threads of one process get the same object.
        self._unclaimed: dict[str, dict[str, Any]] = dict(recorded or {})

    def tick(self) -> int:
        """Advance the registry's clock, which orders preparations and iterations."""
        self._time += 1
        return self._time

    def add(
        self, counter: PositionTracker, name: str | None, dataset: object, *, is_recorded: bool
    ) -> TrackedLoader:
        """Track a loader that is being prepared by the caller's caller."""
        kind = LoaderIdentity(get_location(sys._getframe(2)), describe_dataset(dataset))
        identity = replace(kind, ordinal=len(self._waiting[kind]))
        loader = TrackedLoader(self, counter, name, identity, is_recorded=is_recorded)
        if name is None:
            self._waiting[kind].append(weakref.ref(loader))
            self._prepared.add(identity)
        return loader

    def find_slot(self, loader: TrackedLoader) -> Slot:
        """Return the slot of a loader that is iterated for the first time."""
        if loader.name is None:
            loader.identity = self._resolve_identity(loader.identity)
        for by_ordinal in (True, False):
            slots = [
                slot
                for slot in self._slots
                if (slot.key is not None) == loader.is_recorded
                and slot.matches(loader, by_ordinal=by_ordinal)
            ]
            if len(slots) == 1:
                return slots[0]
        slot = self._open_slot(loader)
        self._slots.append(slot)
        return slot

    def _resolve_identity(self, identity: LoaderIdentity) -> LoaderIdentity:
        """Return the identity without the loaders that were dropped before they were iterated.

        A resumed attempt may skip the loader of the interrupted epoch: the one of the next epoch
        then takes its place.
        """
        waiting = self._waiting.pop(replace(identity, ordinal=0), [])
        dropped = sum(other() is None for other in waiting[: identity.ordinal])
        return replace(identity, ordinal=identity.ordinal - dropped)

    def _open_slot(self, loader: TrackedLoader) -> Slot:
        if not loader.is_recorded:
            return Slot(None, loader.name, loader.identity)
        used = {slot.key for slot in self._slots}
        number = 1 + sum(slot.key is not None and slot.name is None for slot in self._slots)
        key = f"name:{loader.name}"
        if loader.name is None:
            match = match_recorded(loader.identity, number, self._unclaimed, self._prepared)
            while match is None and f"number:{number}" in used | self._unclaimed.keys():
                number += 1
            key = match or f"number:{number}"
        recorded = self._unclaimed.pop(key, {})
        state = recorded.get("state")
        if loader.name is None and is_inside_epoch(state):
            self._check_location(loader.identity, LoaderIdentity(**recorded["loader"]))
        return Slot(key, loader.name, loader.identity, state)

    def _check_location(self, identity: LoaderIdentity, recorded: LoaderIdentity) -> None:
        if self._rank == 0 and identity.location != recorded.location:
            warnings.warn(
                f"This loader of {identity.dataset} resumes from the position of a loader that was "
                "prepared elsewhere in the program. If the program was not edited, identify the "
                "loaders by prepare_data_loader(..., name=).",
                stacklevel=5,
            )

    def record(self) -> dict[str, object] | None:
        """Return the positions of all loaders, including those not used again in this attempt."""
        records: dict[str, object] = dict(self._unclaimed)
        for slot in self._slots:
            state = None if slot.counter is None else slot.counter.position()
            if slot.key is not None and state is not None:
                identity = asdict(slot.identity) if slot.name is None else None
                records[slot.key] = {"loader": identity, "state": state}
        return records or None


def match_recorded(
    identity: LoaderIdentity,
    number: int,
    recorded: Mapping[str, Mapping[str, Any]],
    prepared: Set[LoaderIdentity],
) -> str | None:
    """Return the key of the position in a checkpoint that belongs to a loader without a name.

    Positions of the same identity match. Otherwise the positions are considered that match no other
    loader prepared in this attempt: first with the same location and dataset, then with the same
    dataset, because the program may have been edited, and then with the same location.

    Args:
        identity: Identity of the loader.
        number: Number of the loader among those without a name, in order of their first iteration.
        recorded: Positions in the checkpoint that no loader has claimed yet.
        prepared: Identities of the loaders that this attempt has prepared.

    Raises:
        ValueError: Several positions match, and one of them is inside an epoch.
    """
    identities = {
        key: LoaderIdentity(**record["loader"])
        for key, record in recorded.items()
        if record["loader"] is not None
    }
    for key, other in identities.items():
        if other == identity:
            return key
    free = {key: other for key, other in identities.items() if other not in prepared}
    for fields in (("location", "dataset"), ("dataset",), ("location",)):
        keys = [
            key
            for key, other in free.items()
            if all(getattr(other, field) == getattr(identity, field) for field in fields)
        ]
        # Numbers are meaningless for loaders that are prepared at the same location.
        if len(fields) == 1 and f"number:{number}" in keys:
            return f"number:{number}"
        if len(keys) > 1 and any(is_inside_epoch(recorded[key]["state"]) for key in keys):
            raise ValueError(
                f"{len(keys)} positions in the checkpoint may belong to this loader of "
                f"{identity.dataset}. Pass prepare_data_loader(..., name=) to identify the loaders "
                "in later checkpoints, and resume=False to continue from this one."
            )
        if keys:
            return keys[0]
    return None


def is_inside_epoch(state: Any) -> bool:
    """Return whether data would be read twice if this state were lost."""
    if not isinstance(state, dict):
        return state is not None
    return bool(state.get("consumed", 1) != 0)


def get_location(frame: FrameType | None) -> str:
    """Return a checksum of a frame and its callers inside the training function.

    The checksum is the same in every process that runs the same code, and differs between two calls
    in the same line.
    """
    calls = []
    while frame is not None and not _is_core(frame):
        calls.append((frame.f_code.co_qualname, frame.f_lasti))
        frame = frame.f_back
    return f"{zlib.crc32(repr(calls).encode()):08x}"


def _is_core(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith("drawbar.train.")


def describe_dataset(dataset: object) -> str:
    """Return the type and the length of a dataset, for example `ImageFolder[50000]`."""
    name = type(dataset).__qualname__
    if isinstance(dataset, IterableDataset):  # len() might read all of it
        return name
    try:
        return f"{name}[{len(dataset)}]"  # type: ignore[arg-type]  # TypeError is handled
    except (TypeError, NotImplementedError):
        return name


def get_registry() -> LoaderRegistry:
    """Return the registry of this rank and attempt."""
    return attempt_local(LoaderRegistry)
