"""Serialize user objects between processes.

`serialize` pickles an object with cloudpickle. Ray does not see object references and actor handles
that are in the pickled bytes: they would have no owner in the process that deserializes them, and
`ray.get` would wait forever. `serialize` therefore extracts references, and a `Serialized` stores
them next to the bytes. Ray counts them when it serializes a `Serialized`, and keeps the objects.

Only `deserialize` runs user code. A process that forwards a `Serialized` does not. This module does
not import Ray: in a process that has not imported it, there are no references to Ray objects.
"""

from __future__ import annotations

import functools
import io
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any, cast

import cloudpickle

from drawbar._base.ray_compat import is_owned_by_this_process

MIN_SHARED_BYTES = 1 << 20
"""Minimum size of arrays that are stored in the object store, once per node and read-only."""


Reducer = Callable[[object], tuple[object, ...]]

SharedBuffer = bytes | memoryview | pickle.PickleBuffer
"""Content of a shared array, in this process or in the object store."""


SerializedParts = tuple[bytes | int, tuple[bytes | int, ...], tuple[str | int, ...]]
"""Pickled bytes, shared buffers, and descriptions of references, as plain data.

An integer is the index of an attachment, which is sent separately.
"""


class MissingReferenceError(LookupError):
    """A serialized object refers to an object of a Ray session that has ended."""


class Serialized:
    """A serialized user object, created by `serialize`. Both Ray and `pickle` can serialize it."""

    def __init__(
        self, body: bytes, buffers: Iterable[SharedBuffer] = (), references: Iterable[object] = ()
    ) -> None:
        self._body = body
        self._buffers = tuple(buffers)
        self._references = tuple(references)

    def __reduce__(self) -> tuple[object, ...]:
        # Ray stores PickleBuffers separately from the pickled bytes.
        buffers = [pickle.PickleBuffer(buffer) for buffer in self._buffers]
        return Serialized, (self._body, buffers, self._references)

    @property
    def size(self) -> int:
        """Size in bytes without shared buffers, which processes on a node do not copy."""
        return len(self._body)

    @property
    def missing_references(self) -> list[str]:
        """Descriptions of the references that `serialize_without_references` has replaced."""
        return [
            reference.description
            for reference in self._references
            if isinstance(reference, _MissingReference)
        ]

    @property
    def num_owned_objects(self) -> int:
        """Number of referenced objects that this process owns and that are lost when it ends."""
        if not _is_ray_imported():
            return 0
        import ray

        objects = [ref for ref in self._references if isinstance(ref, ray.ObjectRef)]
        # Subclasses are references of Ray Client. Their objects are lost when this client ends.
        return sum(
            type(ref) is not ray.ObjectRef or is_owned_by_this_process(ref) for ref in objects
        )

    def to_parts(self, attachments: list[object] | None = None) -> SerializedParts:
        """Return the content as plain data.

        Args:
            attachments: List to which references and large buffers are added, which Ray can send
                next to the data. Default: references are replaced by their descriptions.
        """
        if attachments is None:
            descriptions = [_describe_reference(reference) for reference in self._references]
            return self._body, tuple(map(bytes, self._buffers)), tuple(descriptions)
        body: bytes | int = self._body
        if len(self._body) >= MIN_SHARED_BYTES:
            body = _attach(attachments, pickle.PickleBuffer(self._body))
        buffers = [_attach(attachments, pickle.PickleBuffer(buffer)) for buffer in self._buffers]
        references = [_attach(attachments, reference) for reference in self._references]
        return body, tuple(buffers), tuple(references)

    @staticmethod
    def from_parts(parts: SerializedParts, attachments: Sequence[Any] = ()) -> Serialized:
        """Reverse `to_parts`.

        Args:
            parts: Result of `to_parts`.
            attachments: Attachments that were sent with it.

        Raises:
            IndexError: An attachment is missing.
        """
        body, buffers, references = parts
        return Serialized(
            bytes(attachments[body]) if isinstance(body, int) else body,
            [attachments[item] if isinstance(item, int) else item for item in buffers],
            [
                attachments[item] if isinstance(item, int) else _MissingReference(item)
                for item in references
            ],
        )

    def release(self) -> None:
        """Release the references and buffers. The object cannot be deserialized afterwards."""
        self._buffers, self._references = (), ()

    def deserialize(self) -> Any:
        """Return the object.

        Raises:
            MissingReferenceError: The object was read from a file and contains a reference to an
                object of the Ray session that wrote the file.
            Exception: Unpickling fails in this process.
        """
        return self._make_unpickler().load()

    def deserialize_with_script_names(self) -> tuple[Any, dict[str, object]]:
        """Return the object, and the script's functions and classes in it by their names.

        The script is `__main__` of the process that serialized the object.

        Raises:
            Exception: As for `deserialize`.
        """
        unpickler = self._make_unpickler()
        return unpickler.load(), unpickler.load()

    def _make_unpickler(self) -> _Unpickler:
        return _Unpickler(io.BytesIO(self._body), self._buffers, self._references)


def serialize(
    value: object, *, should_share_buffers: bool = False, should_transfer_ownership: bool = False
) -> Serialized:
    """Serialize an object for another process.

    Args:
        value: Object that can be pickled.
        should_share_buffers: Whether to store arrays of at least `MIN_SHARED_BYTES` separately
            from the pickled bytes.
        should_transfer_ownership: Whether to embed referenced objects that this process owns. The
            process that deserializes them becomes their owner. Needed if this process ends earlier.

    Raises:
        Exception: The object cannot be pickled.
    """
    stream, references, buffers = io.BytesIO(), list[object](), list[pickle.PickleBuffer]()
    extract_buffer = functools.partial(_extract_buffer, buffers) if should_share_buffers else None
    extract_reference = functools.partial(_extract_reference, references)
    reducers: dict[type, Reducer] = dict.fromkeys(_list_reference_types(), extract_reference)
    if should_transfer_ownership and _is_ray_imported():
        import ray

        reducers[ray.ObjectRef] = functools.partial(_embed_owned_object, extract_reference)
    pickler = _Pickler(stream, reducers, extract_buffer)
    pickler.dump(value)
    # Refers to objects in the first pickle. Only `deserialize_with_script_names` reads it.
    pickler.dump(dict(pickler.script_names))
    return Serialized(stream.getvalue(), buffers, references)


def serialize_without_references(value: object) -> bytes:
    """Pickle an object for a file, with descriptions in place of references to Ray objects."""
    stream = io.BytesIO()
    _Pickler(stream, dict.fromkeys(_list_reference_types(), _reduce_to_missing)).dump(value)
    return stream.getvalue()


class _MissingReference:
    """Description of a reference that was not written to a file."""

    def __init__(self, description: str) -> None:
        self.description = description


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no types
    """Pickler that tries `reducers` first, then the serializers of cloudpickle, then Ray's."""

    def __init__(
        self,
        stream: io.BytesIO,
        reducers: dict[type, Reducer],
        buffer_callback: Callable[[pickle.PickleBuffer], bool] | None = None,
    ) -> None:
        tables = [reducers, *cloudpickle.Pickler.dispatch_table.maps]
        if _is_ray_imported():
            import ray.cloudpickle

            # Ray contains a copy of cloudpickle, to which `ray.util.register_serializer` adds
            # serializers.
            tables.append(ray.cloudpickle.Pickler.dispatch_table)
        # super().__init__ reads this attribute.
        self.dispatch_table = ChainMap(*tables)
        self.script_names: dict[str, object] = {}
        super().__init__(stream, protocol=5, buffer_callback=buffer_callback)

    def reducer_override(self, obj: Any) -> object:
        """Note the functions and classes of `__main__`, which cloudpickle pickles by value."""
        # Not `isinstance`, which runs code of the object, such as of a weak proxy.
        if issubclass(type(obj), type | FunctionType) and obj.__module__ == "__main__":
            name = obj.__qualname__
            # Another object has the name if a decorator has replaced this one.
            if name.isidentifier() and getattr(sys.modules["__main__"], name, obj) is obj:
                self.script_names.setdefault(name, obj)
        if type(obj) is _CachedFunction and _is_pickled_by_value(obj):
            return _cache_function, (obj.__wrapped__, obj.cache_parameters())
        return super().reducer_override(obj)


_CachedFunction = type(functools.cache(len))


def _is_pickled_by_value(function: Any) -> bool:
    """Return whether another process cannot import a function by its name."""
    module = function.__module__
    packages = {"__main__", *cloudpickle.list_registry_pickle_by_value()}
    is_local = "<locals>" in function.__qualname__
    return is_local or any(f"{module}.".startswith(f"{package}.") for package in packages)


def _cache_function(function: Callable[..., object], parameters: dict[str, Any]) -> object:
    """Return a function with an empty `functools.lru_cache`, which `pickle` finds only by name."""
    return functools.lru_cache(**parameters)(function)


class _Unpickler(pickle.Unpickler):
    def __init__(self, stream: io.BytesIO, buffers: Sequence[object], references: Sequence[object]):
        super().__init__(stream, buffers=buffers)
        self._references = references

    def find_class(self, module: str, name: str, /) -> object:
        if (module, name) == (__name__, _reference_stub.__name__):
            return self._load_reference
        return super().find_class(module, name)

    def _load_reference(self, number: int) -> object:
        reference = self._references[number]
        if isinstance(reference, _MissingReference):
            raise MissingReferenceError(
                f"{reference.description} was lost when its Ray session ended"
            )
        return reference


def _attach(attachments: list[object], value: object) -> int:
    """Add a value to the attachments and return its index."""
    attachments.append(value)
    return len(attachments) - 1


def _is_ray_imported() -> bool:
    """Return whether this process has imported Ray, or is importing it in another thread."""
    return "ray" in sys.modules


def _list_reference_types() -> list[type]:
    """Return the types of references that are extracted from the pickled bytes."""
    if not _is_ray_imported():
        return []
    import ray

    types = [ray.ObjectRef, ray.actor.ActorHandle]
    client = sys.modules.get("ray.util.client.common")  # only loaded in Ray Client processes
    if client is not None:
        types += [client.ClientObjectRef, client.ClientActorHandle]
        types += [client.ClientRemoteFunc, client.ClientActorClass]
    return types


def _extract_buffer(buffers: list[pickle.PickleBuffer], buffer: pickle.PickleBuffer) -> bool:
    """Store a large buffer in `buffers`. Return True for a small one, which is pickled in-band."""
    if buffer.raw().nbytes < MIN_SHARED_BYTES:
        return True
    buffers.append(buffer)
    return False


def _extract_reference(references: list[object], reference: object) -> tuple[object, ...]:
    references.append(reference)
    return _reference_stub, (len(references) - 1,)


def _embed_owned_object(extract_reference: Reducer, reference: object) -> tuple[object, ...]:
    import ray

    if not is_owned_by_this_process(reference):
        return extract_reference(reference)
    # The process that deserializes this calls `ray.put` and owns the new object.
    return ray.put, (ray.get(cast("ray.ObjectRef[object]", reference)),)


def _reduce_to_missing(reference: object) -> tuple[object, ...]:
    return _MissingReference, (_describe_reference(reference),)


def _describe_reference(reference: object) -> str:
    if isinstance(reference, _MissingReference):
        return reference.description
    return f"{type(reference).__name__} {reference!r}"


def _reference_stub(number: int) -> object:
    """Represent a reference in the pickled bytes; `_Unpickler` inserts the reference."""
    raise AssertionError(number)
