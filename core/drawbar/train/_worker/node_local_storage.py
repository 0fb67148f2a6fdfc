"""Transfer checkpoint files between a node with local storage and the driver's node.

Files are sent in chunks over the worker's stream. Each chunk is acknowledged, so at most one is in
memory. This suits checkpoints of up to 1 GB; larger ones need a shared directory or an object
store, as the error message explains.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.checkpoint_store import UploadTarget
from drawbar._storage.contents import MANIFEST_FILE, FileEntry, format_exact_size, is_external
from drawbar._storage.files import remove_tree
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.staging import AssignedFiles, StagedFiles, hold_file_lock
from drawbar._storage.storage_path import read_file_or_none
from drawbar.train._protocol.commands import FILE_CHUNK_BYTES, FileChunkAck, FileReply
from drawbar.train._protocol.messages import FileChunk, FileRequest
from drawbar.train._worker.command_queue import CommandQueue

MAX_TRANSFER_BYTES = 1_000_000_000
"""Maximum bytes that one rank may send for a checkpoint."""


class NodeLocalStorage(UploadTarget):
    """Storage on a node that does not share the run directory with the driver's node.

    Args:
        directory: Run directory on this node.
        command_queue: Sends requests to the controller and receives its replies.
    """

    def __init__(self, directory: RunDirectory, command_queue: CommandQueue) -> None:
        self._directory = directory
        self._command_queue = command_queue
        self._fetched_checkpoint: Checkpoint | None = None

    def is_staged(self, path: Path) -> bool:
        """Return False: a commit cannot use any directory of this node."""
        return False

    def persist(self, assigned: AssignedFiles) -> StagedFiles:
        """Send files to the driver's node.

        Raises:
            OSError: The files are too large to send.
        """
        if assigned.nbytes > MAX_TRANSFER_BYTES:
            raise OSError(
                f"{assigned.label} saved {format_exact_size(assigned.nbytes)} for checkpoint "
                f"{assigned.checkpoint_name}, but can send at most "
                f"{format_exact_size(MAX_TRANSFER_BYTES)} to the driver's node. The files must be "
                f"sent, because node {os.uname().nodename} does not share "
                f"{self._directory.local_path} with the driver's node. Set RunConfig.storage_path "
                "to a directory that all nodes share, or to an object store."
            )
        for file in assigned.files:
            self._send_file(assigned.source_directory, assigned.checkpoint_name, file)
        return StagedFiles(None, tuple(assigned.files))

    def _send_file(self, source: Path, name: str, file: FileEntry) -> None:
        offset = 0
        with open(source / file.path, "rb") as reader:
            # An empty file needs one empty chunk, or it would not be created.
            while (data := reader.read(FILE_CHUNK_BYTES)) or not offset:
                self._send_chunk(name, file.path, offset, data)
                offset += len(data)
                if not data:
                    break

    def _send_chunk(self, name: str, path: str, offset: int, data: bytes) -> None:
        self._command_queue.request(
            lambda request_id: FileChunk(
                request_id=request_id, checkpoint_name=name, path=path, offset=offset, data=data
            ),
            FileChunkAck,
        )

    def fetch_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Copy a checkpoint of the run from the driver's node to the same path on this node.

        One rank of the node copies while the others wait. An existing directory is used only if it
        has the same manifest, because it can belong to an earlier run.
        """
        name = self._directory.checkpoints.get_in_place_name(checkpoint)
        if name is None or is_external(name) or checkpoint == self._fetched_checkpoint:
            return
        path = self._directory.local_path / name
        # All ranks of the node call this at the same time, and one copy is enough.
        with hold_file_lock(self._directory.local_path / ".bring.lock"):
            listed = {file.path: file for file in self._request(name, "", 0).files}
            manifest = b"".join(self._iter_chunks(name, listed[MANIFEST_FILE]))
            if read_file_or_none(path, MANIFEST_FILE) != manifest:
                remove_tree(path)
                path.parent.mkdir(parents=True, exist_ok=True)
                os.rename(self._download(name, listed.values()), path)
        self._fetched_checkpoint = checkpoint

    def _request(self, name: str, path: str, offset: int) -> FileReply:
        """Request a chunk of a file from the controller; the list of files if `path` is empty."""
        return self._command_queue.request(
            lambda request_id: FileRequest(
                request_id=request_id, checkpoint_name=name, path=path, offset=offset
            ),
            FileReply,
        )

    def _download(self, name: str, files: Iterable[FileEntry]) -> Path:
        staging_directory = self._directory.staging.make_directory("brought")
        for file in files:
            target = staging_directory / file.path
            target.parent.mkdir(parents=True, exist_ok=True)
            with open(target, "wb") as writer:
                writer.writelines(self._iter_chunks(name, file))
        return staging_directory

    def _iter_chunks(self, name: str, file: FileEntry) -> Iterator[bytes]:
        offset = 0
        while offset < file.size:
            data = self._request(name, file.path, offset).data
            offset += len(data)
            yield data
