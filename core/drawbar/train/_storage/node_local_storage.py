"""A worker on a node that does not share the run's directory: its files travel to the driver's.

They go in chunks through the worker's stream, each one acknowledged, so that no more than one is
ever in memory. That suits checkpoints of up to a gigabyte; for larger ones a shared folder or an
object store is the right storage, and the worker says so.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import msgspec

from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.checkpoint_store import UploadTarget
from drawbar.train._storage.contents import (
    CHECKSUMS_FILE,
    MANIFEST_FILE,
    FileEntry,
    is_external,
    list_files,
)
from drawbar.train._storage.files import remove_tree
from drawbar.train._storage.manifest import read_file_or_none
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._storage.sizes import format_exact_size
from drawbar.train._storage.staging import AssignedFiles, StagedFiles, hold_file_lock


class FileReply(msgspec.Struct, frozen=True, kw_only=True):
    """A piece of a file, or a list of files."""

    number: int
    data: bytes = b""
    files: tuple[FileEntry, ...] = ()


CHUNK_BYTES = 8 * 1024 * 1024
MAX_TRANSFER_BYTES = 1_000_000_000
"""Bytes of one rank's share of a checkpoint that may travel."""

SendChunk = Callable[[str, str, int, bytes], None]
"""Sends a piece of a file: name of the checkpoint, path in it, offset, bytes."""

RequestFile = Callable[[str, str, int], FileReply]
"""Asks for a piece of a file in the same way; with an empty path for the list of files."""


class NodeLocalStorage(UploadTarget):
    """A node that has a folder of the run's path, but not the one that the driver's node has.

    Args:
        directory: The run's directory on this node.
        send: Takes pieces to the driver's node.
        ask: Brings pieces from there.
    """

    def __init__(
        self, directory: RunDirectory, send_chunk: SendChunk, request_file: RequestFile
    ) -> None:
        self._directory = directory
        self._send = send_chunk
        self._ask = request_file
        self._fetched_checkpoint: Checkpoint | None = None

    def is_staged(self, path: Path) -> bool:
        """Nothing that is here lies where a commit can take it."""
        return False

    def persist(self, share: AssignedFiles) -> StagedFiles:
        """Send these files to the driver's node.

        Raises:
            OSError: They are too large for that.
        """
        if share.nbytes > MAX_TRANSFER_BYTES:
            raise OSError(
                f"{share.label} on node {os.uname().nodename} has "
                f"{format_exact_size(share.nbytes)} for "
                f"checkpoint {share.checkpoint_name}, and this node does not share "
                f"{self._directory.local_path} "
                f"with the driver's node; no more than {format_exact_size(MAX_TRANSFER_BYTES)} "
                "travel. Set "
                "RunConfig.storage_path to a folder that all nodes share, or to an object store"
            )
        for file in share.files:
            self._send_file(share.source_directory, share.checkpoint_name, file)
        return StagedFiles(None, tuple(share.files))

    def _send_file(self, source: Path, name: str, file: FileEntry) -> None:
        offset = 0
        with open(source / file.path, "rb") as reader:
            # An empty file is one piece without bytes, or it would not be there.
            while (data := reader.read(CHUNK_BYTES)) or not offset:
                self._send(name, file.path, offset, data)
                offset += len(data)
                if not data:
                    break

    def fetch_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint of the run from the driver's node to the same path here.

        One of this node's ranks does it while the others wait. A directory that is there counts
        only if it has the same manifest: it may be that of an earlier run.
        """
        name = self._directory.checkpoints.get_in_place_name(checkpoint)
        if name is None or is_external(name) or checkpoint == self._fetched_checkpoint:
            return
        path = self._directory.local_path / name
        # All ranks of the node ask at the same moment, and one copy is enough.
        with hold_file_lock(self._directory.local_path / ".bring.lock"):
            listed = {file.path: file for file in self._ask(name, "", 0).files}
            manifest = b"".join(self._iter_chunks(name, listed[MANIFEST_FILE]))
            if read_file_or_none(path, MANIFEST_FILE) != manifest:
                remove_tree(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                os.rename(self._download(name, listed.values()), path)
        self._fetched_checkpoint = checkpoint

    def _download(self, name: str, files: Iterable[FileEntry]) -> Path:
        stage = self._directory.staging.make_directory("brought")
        for file in files:
            target = stage / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "wb") as writer:
                writer.writelines(self._iter_chunks(name, file))
        return stage

    def _iter_chunks(self, name: str, file: FileEntry) -> Iterator[bytes]:
        offset = 0
        while offset < file.size:
            data = self._ask(name, file.path, offset).data
            offset += len(data)
            yield data


def read_chunk(directory: RunDirectory, name: str, path: str, offset: int) -> FileReply:
    """Answer the question of such a worker, on the driver's node."""
    folder = directory.local_path / name
    if not path:
        names = (MANIFEST_FILE, CHECKSUMS_FILE)
        own = [FileEntry(n, (folder / n).stat().st_size) for n in names if (folder / n).exists()]
        return FileReply(number=0, files=(*list_files(folder), *own))
    with open(folder / path, "rb") as reader:
        reader.seek(offset)
        return FileReply(number=0, data=reader.read(CHUNK_BYTES))


def write_chunk(target: Path, offset: int, data: bytes) -> None:
    """Write what such a worker has sent, on the driver's node."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with open(target, "ab" if offset else "wb") as file:
        file.write(data)
