"""Transfer files of checkpoints between a rank and the driver's node."""

from __future__ import annotations

from drawbar.train._protocol.commands import FileChunkAck
from drawbar.train._protocol.messages import FileChunk, FileRequest
from drawbar.train._storage.node_local_storage import FileReply, NodeLocalStorage
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._worker.command_queue import CommandQueue


def make_node_local_storage(
    directory: RunDirectory, command_queue: CommandQueue
) -> NodeLocalStorage:
    """Return the storage of a rank whose node does not share the run directory.

    Args:
        directory: Run directory.
        command_queue: Sends requests to the controller and receives its replies.
    """

    def send_chunk(name: str, path: str, offset: int, data: bytes) -> None:
        command_queue.request(
            lambda request_id: FileChunk(
                request_id=request_id, checkpoint_name=name, path=path, offset=offset, data=data
            ),
            FileChunkAck,
        )

    def request_chunk(name: str, path: str, offset: int) -> FileReply:
        return command_queue.request(
            lambda request_id: FileRequest(
                request_id=request_id, checkpoint_name=name, path=path, offset=offset
            ),
            FileReply,
        )

    return NodeLocalStorage(directory, send_chunk, request_chunk)
