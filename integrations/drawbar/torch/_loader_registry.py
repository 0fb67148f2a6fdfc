"""Find the position in a checkpoint that belongs to a data loader.

A training function may prepare a loader once, or a new loader in each epoch. If the same line
prepares several loaders one after another, each of them continues with the next epoch.

Loaders are identified by their name. A loader without a name is identified by the call that
prepares it, by its dataset, and by an ordinal. The ordinal distinguishes loaders that one line
prepares before any of them is iterated, for example in a list comprehension.
"""

from __future__ import annotations

import sys
import warnings
import weakref
import zlib
from collections import defaultdict
from collections.abc import Mapping, Set
from dataclasses import asdict, dataclass, replace
from types import FrameType
from typing import Any, cast

from torch.utils.data import IterableDataset

from drawbar.torch._data_position import PositionTracker, SamplerPositionTracker
from drawbar.train import get_context
from drawbar.train.backend import register_batch_description, register_data_position


@dataclass(frozen=True)
class LoaderIdentity:
    """Identity of a loader without a name.

    Args:
        location: Checksum of the call of `prepare_data_loader` and its callers.
        dataset: Type and length of the dataset.
        ordinal: 0, 1, 2, ... for loaders of the same location and dataset that are prepared before
            any of them is iterated.
    """

    location: str
    dataset: str
    ordinal: int = 0


@dataclass(eq=False)
class TrackedLoader:
    """A prepared loader. It joins an `EpochSequence` at its first iteration.

    Args:
        registry: The registry of this rank.
        tracker: Tracks the position of the loader.
        name: Name of the loader; None to identify it by `identity`.
        identity: Identity of the loader.
        is_recorded: Whether checkpoints contain the position.
        prepared_at: Event number of the preparation.
        sequence: Sequence of the loader; None before its first iteration.
    """

    registry: LoaderRegistry
    tracker: PositionTracker
    name: str | None
    identity: LoaderIdentity
    is_recorded: bool
    prepared_at: int
    sequence: EpochSequence | None = None

    def begin(self, position: object = None) -> None:
        """Begin an iteration.

        It continues after the previous iteration of the loader's sequence. The first iteration of a
        sequence resumes from the checkpoint.

        Args:
            position: Position to begin at instead; None for the next one.

        Raises:
            ValueError: Several positions in the checkpoint may belong to this loader.
        """
        sequence = self.sequence or self.registry.find_sequence(self)
        if sequence.tracker is None:
            if sequence.recorded is not None:
                self.tracker.resume_from(sequence.recorded)
        elif sequence.tracker is not self.tracker:
            self.tracker.follow(sequence.tracker)
        sequence.tracker, sequence.begun_at = self.tracker, self.registry.next_event_number()
        self.sequence = sequence
        if position is not None:
            self.tracker.resume_from(position)
        self.tracker.start_epoch()

    def skip(self, position: object) -> None:
        """Record an iteration that another process has completed, at the position after it."""
        sequence = self.sequence or self.registry.find_sequence(self)
        if position is not None:
            self.tracker.resume_from(position)
        sequence.tracker, sequence.begun_at = self.tracker, self.registry.next_event_number()
        self.sequence = sequence


@dataclass
class EpochSequence:
    """Consecutive epochs of one loader, or of several loaders that are prepared one by one.

    Args:
        key: Key in the checkpoint; None if checkpoints do not contain the position.
        name: Name of the loaders, if they have one.
        identity: Identity of the loaders.
        recorded: State in the checkpoint that this attempt resumes from.
        tracker: Tracker of the loader that began the latest iteration.
        begun_at: Event number of the beginning of the latest iteration.
    """

    key: str | None
    name: str | None
    identity: LoaderIdentity
    recorded: object = None
    tracker: PositionTracker | None = None
    begun_at: int = 0

    def matches(self, loader: TrackedLoader, *, by_ordinal: bool) -> bool:
        """Return whether a loader may continue this sequence.

        Args:
            loader: Loader that is iterated for the first time.
            by_ordinal: Whether the ordinals of loaders without a name must be equal too.
        """
        if self.name is not None or loader.name is not None:
            return self.name == loader.name
        identity, other = self.identity, loader.identity
        is_later = self.begun_at < loader.prepared_at
        is_same = identity.location == other.location and identity.dataset == other.dataset
        return is_later and is_same and (not by_ordinal or identity.ordinal == other.ordinal)


class LoaderRegistry:
    """The loaders of one rank in one attempt."""

    def __init__(self) -> None:
        self._rank = get_context().get_world_rank()
        self._num_events = 0
        self._sequences: list[EpochSequence] = []
        self._prepared: set[LoaderIdentity] = set()
        # Prepared loaders of one location and dataset. The list is removed as soon as one of them
        # is iterated. The key has ordinal 0.
        self._not_iterated = defaultdict[LoaderIdentity, list[weakref.ref[TrackedLoader]]](list)
        recorded = register_data_position(
            "data_loaders", self.record, skip_batches=self.record_after
        )
        register_batch_description(self.describe_batch)
        # A copy, since ranks in threads of one process get the same object.
        self._unclaimed: dict[str, dict[str, Any]] = dict(recorded or {})

    def next_event_number(self) -> int:
        """Return the next number, which orders the preparations and iterations of all loaders."""
        self._num_events += 1
        return self._num_events

    def add(
        self, tracker: PositionTracker, name: str | None, dataset: object, *, is_recorded: bool
    ) -> TrackedLoader:
        """Track a loader. Only `prepare_data_loader` may call this method."""
        user_frame = sys._getframe(2)  # the caller of prepare_data_loader()
        first = LoaderIdentity(get_location(user_frame), describe_dataset(dataset))
        identity = replace(first, ordinal=len(self._not_iterated[first]))
        prepared_at = self.next_event_number()
        loader = TrackedLoader(self, tracker, name, identity, is_recorded, prepared_at)
        if name is None:
            self._not_iterated[first].append(weakref.ref(loader))
            self._prepared.add(identity)
        return loader

    def find_sequence(self, loader: TrackedLoader) -> EpochSequence:
        """Return the sequence of a loader that is iterated for the first time."""
        if loader.name is None:
            loader.identity = self._resolve_identity(loader.identity)
        # Without an equal ordinal, a sequence is used only if there is no other candidate.
        for by_ordinal in (True, False):
            candidates = [
                sequence
                for sequence in self._sequences
                if (sequence.key is not None) == loader.is_recorded
                and sequence.matches(loader, by_ordinal=by_ordinal)
            ]
            if len(candidates) == 1:
                return candidates[0]
        sequence = self._start_sequence(loader)
        self._sequences.append(sequence)
        return sequence

    def _resolve_identity(self, identity: LoaderIdentity) -> LoaderIdentity:
        """Return the identity with an ordinal that ignores deleted loaders.

        A resumed training function may prepare a loader for an epoch that it then skips. The loader
        is deleted without an iteration. The loader of the next epoch must have the same ordinal as
        in a run that does not skip.
        """
        prepared = self._not_iterated.pop(replace(identity, ordinal=0), [])
        num_deleted = sum(other() is None for other in prepared[: identity.ordinal])
        return replace(identity, ordinal=identity.ordinal - num_deleted)

    def _start_sequence(self, loader: TrackedLoader) -> EpochSequence:
        if not loader.is_recorded:
            return EpochSequence(None, loader.name, loader.identity)
        key = self._choose_key(loader)
        recorded = self._unclaimed.pop(key, {})
        state = recorded.get("state")
        if loader.name is None and is_inside_epoch(state):
            self._check_location(loader.identity, LoaderIdentity(**recorded["loader"]))
        return EpochSequence(key, loader.name, loader.identity, state)

    def _choose_key(self, loader: TrackedLoader) -> str:
        """Return the key of a new sequence: a recorded key that matches, or an unused one."""
        if loader.name is not None:
            return f"name:{loader.name}"
        number = 1 + sum(
            sequence.key is not None and sequence.name is None for sequence in self._sequences
        )
        match = match_recorded(loader.identity, number, self._unclaimed, self._prepared)
        if match is not None:
            return match
        used = {sequence.key for sequence in self._sequences} | self._unclaimed.keys()
        while f"number:{number}" in used:
            number += 1
        return f"number:{number}"

    def _check_location(self, identity: LoaderIdentity, recorded: LoaderIdentity) -> None:
        if self._rank == 0 and identity.location != recorded.location:
            warnings.warn(
                f"This loader of {identity.dataset} resumes from a position that another "
                "prepare_data_loader() call recorded. This is correct if you have edited the "
                "program since then. Otherwise, pass name= to each call to identify the loaders.",
                stacklevel=7,
            )

    def describe_batch(self) -> str:
        """Return the dataset, epoch, and rows of the batch that was requested last."""
        sequence = max(self._sequences, key=lambda sequence: sequence.begun_at, default=None)
        if sequence is None or sequence.tracker is None:
            return ""
        tracker, batch = sequence.tracker, f"epoch {sequence.tracker.epoch_start[0]}"
        if isinstance(tracker, SamplerPositionTracker):
            batch = tracker.describe_batch()
        return f"{sequence.name or sequence.identity.dataset}, {batch}"

    def record_after(self, num_batches: int) -> dict[str, object]:
        """Return the positions of all loaders, after more batches of the newest running iteration.

        Raises:
            RuntimeError: No iteration is running, or its loader cannot skip batches.
        """
        records = self.record() or {}
        sampled = {
            sequence.begun_at: (sequence, sequence.tracker)
            for sequence in self._sequences
            if isinstance(sequence.tracker, SamplerPositionTracker)
        }
        running = [number for number, (_, tracker) in sampled.items() if tracker.is_running]
        if not running:
            if records and len(sampled) == len(self._sequences) and not num_batches:
                return records  # between two epochs
            raise RuntimeError(
                "rollback() needs a running loop over a loader of prepare_data_loader that draws "
                "its samples from a sampler. It cannot skip batches of an IterableDataset or of a "
                "DistributedSampler. Call it inside this loop."
            )
        # The newest one: a loop over validation data may be inside the loop over training data.
        sequence, tracker = sampled[max(running)]
        if sequence.key is None:
            raise RuntimeError("rollback() cannot skip batches of a data loader with resume=False.")
        record = cast("dict[str, object]", records[sequence.key])
        state = tracker.position_after(num_batches)
        return {**records, sequence.key: {**record, "state": state}}

    def record(self) -> dict[str, object] | None:
        """Return the positions of all loaders.

        Positions from the resume checkpoint that no loader has used yet are included.
        """
        records: dict[str, object] = dict(self._unclaimed)
        for sequence in self._sequences:
            state = None if sequence.tracker is None else sequence.tracker.position()
            if sequence.key is not None and state is not None:
                identity = asdict(sequence.identity) if sequence.name is None else None
                records[sequence.key] = {"loader": identity, "state": state}
        return records or None


def match_recorded(
    identity: LoaderIdentity,
    number: int,
    recorded: Mapping[str, Mapping[str, Any]],
    prepared: Set[LoaderIdentity],
) -> str | None:
    """Return the key of the position in a checkpoint that belongs to a loader without a name.

    A position with the same identity matches. If there is none, positions of other loaders that
    this attempt has prepared are excluded. The remaining positions are compared in this order:

    1. by location and dataset
    2. by dataset only, because the program may have been edited
    3. by location only, because the dataset may have changed

    Args:
        identity: Identity of the loader.
        number: Number of the loader among those without a name, in order of their first iteration.
        recorded: Positions in the checkpoint that no loader has used yet.
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
        # Not for equal location and dataset: the ordinals distinguish these loaders.
        if len(fields) == 1 and f"number:{number}" in keys:
            return f"number:{number}"
        if len(keys) > 1 and any(is_inside_epoch(recorded[key]["state"]) for key in keys):
            raise ValueError(
                f"{len(keys)} positions in the checkpoint may belong to this loader of "
                f"{identity.dataset}. Pass prepare_data_loader(..., name=) for each of these "
                "loaders: it then starts from the beginning of its data, and later checkpoints "
                "identify it by its name."
            )
        if keys:
            return keys[0]
    return None


def is_inside_epoch(state: Any) -> bool:
    """Return whether a position is inside an epoch. Without it, data would be read twice.

    The state of a dataset with `state_dict` always counts as inside an epoch.
    """
    if not isinstance(state, dict):
        return state is not None
    return bool(state.get("consumed", 1) != 0)


def get_location(frame: FrameType | None) -> str:
    """Return a checksum of a frame and its callers inside the training function.

    The checksum is the same in every process that runs the same code. Two calls on the same line
    have different checksums.
    """
    calls = []
    while frame is not None and not _is_core(frame):
        calls.append((frame.f_code.co_qualname, frame.f_lasti))
        frame = frame.f_back
    return f"{zlib.crc32(repr(calls).encode()):08x}"


def _is_core(frame: FrameType) -> bool:
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith(("drawbar.train.", "drawbar._process.", "drawbar._fork_server."))


def describe_dataset(dataset: object) -> str:
    """Return the type and the length of a dataset, for example `ImageFolder[50000]`."""
    name = type(dataset).__qualname__
    if isinstance(dataset, IterableDataset):  # len() might read all of it
        return name
    try:
        return f"{name}[{len(dataset)}]"  # type: ignore[arg-type]  # TypeError is handled
    except (TypeError, NotImplementedError):
        return name
