"""What users made, on its way from one process to another.

cloudpickle makes bytes of it, which tell Ray nothing of the object references and actor handles in
them: nobody owns those, and `ray.get` would wait for ever. So what only Ray can send travels beside
the bytes, in the object that Ray itself serialises: it counts them, and their owner keeps them.
Only `unpack` runs code of the user's; a process in between just holds a `Carried`. Ray is imported
by what packs: who only reads of runs needs none.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from typing import Any, cast

import cloudpickle

MIN_SHARED_BYTES = 1 << 20
"""From this size on a captured array lies in the object store, once per node and read-only."""


Reducer = Callable[[object], tuple[object, ...]]

SharedBuffer = bytes | memoryview | pickle.PickleBuffer
"""The bytes of such an array: of this process, or where they lie in the object store."""


class MissingReferenceError(LookupError):
    """What should be unpacked refers to something that ended with the Ray that it was in."""


class Serialized:
    """Something of the user's, packed by `carry`. It pickles, by Ray and otherwise."""

    def __init__(
        self, body: bytes, buffers: Iterable[SharedBuffer] = (), references: Iterable[object] = ()
    ) -> None:
        self._body = body
        self._buffers = tuple(buffers)
        self._references = tuple(references)

    def __reduce__(self) -> tuple[object, ...]:
        buffers = [pickle.PickleBuffer(each) for each in self._buffers]  # which Ray puts beside
        return Serialized, (self._body, buffers, self._references)

    @property
    def size(self) -> int:
        """Bytes that each process copies: all but what is shared."""
        return len(self._body)

    @property
    def missing_references(self) -> list[str]:
        """Name what it refers to and was not kept in the file that it comes from."""
        return [
            each.description for each in self._references if isinstance(each, _MissingReference)
        ]

    @property
    def num_owned_objects(self) -> int:
        """Number of the objects referred to that this process owns: they end with it."""
        import ray

        objects = [each for each in self._references if isinstance(each, ray.ObjectRef)]
        return sum(type(each) is not ray.ObjectRef or _is_owned_here(each) for each in objects)

    def release(self) -> None:
        """Hold no longer what it refers to: it is not needed any more."""
        self._buffers, self._references = (), ()

    def deserialize(self) -> Any:
        """Give it back.

        Raises:
            MissingReferenceError: It was kept in a file, and refers to something in Ray.
            Exception: It does not unpickle here.
        """
        stream = io.BytesIO(self._body)
        return _Unpickler(stream, self._buffers, self._references).load()


def serialize(
    value: object, *, should_share_buffers: bool = False, should_transfer_ownership: bool = False
) -> Serialized:
    """Pack something for another process.

    Args:
        value: Anything that pickles.
        shares: Arrays of `MIN_SHARED_BYTES` and more stay out of the bytes.
        leaves: This process ends before it is unpacked: where it refers to an object that this
            process owns, the object itself is packed, and whoever unpacks it owns it.

    Raises:
        Exception: It does not pickle.
    """
    # Not `cloudpickle.dumps`: its pickler knows nothing of what is to be set aside.
    stream, references, buffers = io.BytesIO(), list[object](), list[pickle.PickleBuffer]()
    apart = functools.partial(_extract_buffer, buffers) if should_share_buffers else None
    aside = functools.partial(_extract_reference, references)
    reducers: dict[type, Reducer] = dict.fromkeys(_list_reference_types(), aside)
    if should_transfer_ownership:
        import ray

        reducers[ray.ObjectRef] = functools.partial(_embed_owned_object, aside)
    _Pickler(stream, reducers, apart).dump(value)
    return Serialized(stream.getvalue(), buffers, references)


def serialize_without_references(value: object) -> bytes:
    """Pickle something for a file. A `Carried` in it can be unpacked if it refers to nothing."""
    stream = io.BytesIO()
    _Pickler(stream, dict.fromkeys(_list_reference_types(), _reduce_to_missing)).dump(value)
    return stream.getvalue()


class _MissingReference:
    """Stands in a file for what was not kept."""

    def __init__(self, what: str) -> None:
        self.description = what


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickles by `reducers`, else as cloudpickle and Ray do (`ray.util.register_serializer`)."""

    def __init__(
        self,
        stream: io.BytesIO,
        reducers: dict[type, Reducer],
        buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None,
    ) -> None:
        import ray.cloudpickle

        # Ray has a cloudpickle of its own, with the serializers that users have registered there.
        others = cloudpickle.Pickler.dispatch_table.maps
        by_ray = ray.cloudpickle.Pickler.dispatch_table
        self.dispatch_table = ChainMap(reducers, *others, by_ray)  # which __init__ reads
        super().__init__(stream, protocol=5, buffer_callback=buffer_callback)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, buffers: Sequence[object], references: Sequence[object]):
        super().__init__(stream, buffers=buffers)
        self._references = references

    def find_class(self, module: str, name: str, /) -> object:
        if (module, name) == (__name__, _reference_stub.__name__):
            return self._load_reference
        return super().find_class(module, name)

    def _load_reference(self, number: int) -> object:
        found = self._references[number]
        if isinstance(found, _MissingReference):
            raise MissingReferenceError(f"{found.description} ended with the Ray that it was in")
        return found


def _list_reference_types() -> list[type]:
    """Give the types that Ray counts, or puts stubs in the place of."""
    import ray

    types = [ray.ObjectRef, ray.actor.ActorHandle]
    client = sys.modules.get("ray.util.client.common")  # a process that is none never loads it
    if client is not None:
        types += [client.ClientObjectRef, client.ClientActorHandle]
        types += [client.ClientRemoteFunc, client.ClientActorClass]
    return types


def _extract_buffer(buffers: list[pickle.PickleBuffer], buffer: pickle.PickleBuffer) -> bool:
    """Keep a large buffer out of the bytes; tells whether it goes into them."""
    if buffer.raw().nbytes < MIN_SHARED_BYTES:
        return True
    buffers.append(buffer)
    return False


def _extract_reference(references: list[object], found: object) -> tuple[object, ...]:
    references.append(found)
    return _reference_stub, (len(references) - 1,)


def _embed_owned_object(aside: Reducer, found: object) -> tuple[object, ...]:
    import ray

    if not _is_owned_here(found):
        return aside(found)
    # Whoever unpacks it puts it anew, and so owns what outlives this process.
    return ray.put, (ray.get(cast("ray.ObjectRef[object]", found)),)


def _reduce_to_missing(found: object) -> tuple[object, ...]:
    return _MissingReference, (f"{type(found).__name__} {found!r}",)


def _reference_stub(number: int) -> object:
    """Stand in the bytes for what was set aside; `_Unpickler` puts that in its place."""
    raise AssertionError(number)


def _is_owned_here(reference: object) -> bool:
    """Whether this process owns an object, that is, whether the object ends with it."""
    import ray

    worker: Any = ray._private.worker.global_worker
    owner: bytes = worker.core_worker.get_owner_address(reference)
    # There is no public call; the address is a message of Ray's that has the id in it.
    return bytes.fromhex(ray.get_runtime_context().get_worker_id()) in owner
