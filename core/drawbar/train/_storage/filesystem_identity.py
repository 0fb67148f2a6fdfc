"""Compare filesystems, also of different threads and processes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from drawbar.train._storage.fsspec_listing import get_fsspec_filesystem

if TYPE_CHECKING:
    from fsspec import AbstractFileSystem
    from pyarrow.fs import FileSystem

_ENDPOINT_SETTINGS = (  # pyarrow's and fsspec's settings that identify the server of a filesystem
    "account_name",
    "blob_storage_authority",
    "endpoint_override",
    "endpoint_url",
    "host",
    "port",
)


def is_same_filesystem(one: FileSystem, other: FileSystem) -> bool:
    """Return True if two pyarrow filesystems are equal.

    Wrapped fsspec filesystems compare equal only if the same thread created them, so their
    constructor arguments are compared.
    """
    return (
        bool(one.equals(other))
        or _get_constructor_key(one) == _get_constructor_key(other) is not None
    )


def _get_constructor_key(filesystem: FileSystem) -> tuple[object, ...] | None:
    wrapped = get_fsspec_filesystem(filesystem)
    if wrapped is None or not hasattr(wrapped, "storage_options"):
        return None
    return type(wrapped), wrapped.storage_args, wrapped.storage_options


def describe_endpoint(filesystem: FileSystem | AbstractFileSystem) -> str:
    """Return the server, account, or subtree of a filesystem; "" if its type has only one.

    The result is the same in every process, and does not depend on credentials, which can change
    between runs.
    """
    wrapped = getattr(getattr(filesystem, "handler", None), "fs", filesystem)
    for inner, path in (("base_fs", "base_path"), ("fs", "path")):
        if hasattr(wrapped, inner):
            return (
                f"{describe_endpoint(getattr(wrapped, inner))} {getattr(wrapped, path, '')}".strip()
            )
    return " ".join(sorted(_iter_endpoints(_get_constructor_settings(wrapped))))


def _get_constructor_settings(filesystem: FileSystem | AbstractFileSystem) -> dict[str, object]:
    if hasattr(filesystem, "storage_options"):
        return dict(filesystem.storage_options)
    try:
        (settings,) = filesystem.__reduce__()[1]
        return dict(settings)
    except (TypeError, ValueError):  # not serializable, or without settings
        return {}


def _iter_endpoints(settings: dict[str, object]) -> Iterator[str]:
    for name, value in settings.items():
        if isinstance(value, dict):  # s3fs also accepts the endpoint in client_kwargs
            yield from _iter_endpoints(value) if name == "client_kwargs" else ()
        elif name in _ENDPOINT_SETTINGS and value:
            yield f"{name}={value}"
