"""Copy files between a local directory and a remote one, in several threads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

from drawbar.train._storage import fault_points
from drawbar.train._storage.contents import FileEntry, format_exact_size
from drawbar.train._storage.remote_path import RemotePath
from drawbar.train._storage.retries import retry_transient
from drawbar.train._threads import DaemonThreadPool

T = TypeVar("T")

_TRANSFER_THREADS = 8
_TRANSFER_CHUNK_BYTES = 16 * 1024 * 1024


def upload_files(source: Path, target: RemotePath, files: Sequence[FileEntry]) -> dict[str, str]:
    """Copy files of a local directory into a remote one.

    Returns:
        The xxh3 (64 bit) of each written file as 16 hex digits, by path.
    """
    fault_points.maybe_stop_at("persist.start")
    checksums = _transfer_parallel(
        files, lambda file: upload_file(source / file.path, target, file)
    )
    return {file.path: checksum for file, checksum in zip(files, checksums, strict=True)}


def upload_file(source: Path, target: RemotePath, file: FileEntry) -> str:
    """Copy a local file to `file` in a remote directory, and return its xxh3."""
    import xxhash

    def upload() -> str:
        # A new digest for each try: a failed try has hashed only a part of the file.
        digest = xxhash.xxh3_64()
        with open(source, "rb") as reader, target.open_output(file.path) as writer:
            while chunk := reader.read(_TRANSFER_CHUNK_BYTES):
                writer.write(chunk)
                digest.update(chunk)
        return str(digest.hexdigest())

    return retry_transient(
        upload, f"writing {format_exact_size(file.size)} to {target / file.path}"
    )


def download_files(source: RemotePath, target: Path, files: Sequence[FileEntry]) -> None:
    """Copy files of a remote directory into a local one."""
    _transfer_parallel(files, lambda file: _download_file(source, target / file.path, file))


def _download_file(source: RemotePath, target: Path, file: FileEntry) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)

    def download() -> None:
        with source.open_input(file.path) as reader, open(target, "wb") as writer:
            while chunk := reader.read(_TRANSFER_CHUNK_BYTES):
                writer.write(chunk)

    retry_transient(download, f"reading {format_exact_size(file.size)} from {source / file.path}")


def _transfer_parallel(files: Sequence[FileEntry], action: Callable[[FileEntry], T]) -> list[T]:
    results: list[T] = []
    with DaemonThreadPool(min(_TRANSFER_THREADS, max(len(files), 1)), "drawbar-transfer") as pool:
        for result in pool.map(action, files):
            if not results:
                fault_points.maybe_stop_at("persist.half")
            results.append(result)
    return results
