"""Messages between rank 0 and the other processes of a torchrun group.

Messages of a rank and commands to its session are the same in all runs. The structs in this
module are specific to torchrun. Peers trust rank 0 and unpickle the `bytes` that it sends. Rank 0
unpickles nothing that it receives, except the results of functions of a backend.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from drawbar._process.codec import Codec
from drawbar._process.ranks import WorkerInfo
from drawbar._process.serialization import Serialized
from drawbar._process.stack import Stack
from drawbar.train._protocol.commands import Command
from drawbar.train._protocol.messages import Message, WorkerDied


class PeerHello(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """First message of a peer, on each of its two connections.

    Attributes:
        rank: Rank of the peer.
        info: Node and process of the peer.
        direction: Whether the connection transmits commands to the peer or messages from it.
        token: Random text of the process, the same on both connections.
    """

    rank: int
    info: WorkerInfo
    direction: Literal["commands", "messages"]
    token: str


class FunctionCancelled(msgspec.Struct, frozen=True, tag=True):
    """Ctrl-C ended the training function. It is not a failure and replaces the final message."""


class PeerReply(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Reply to a request: a stack, a serialized value, or an error."""

    request_id: int
    stack: Stack | None = None
    value: Serialized | None = None
    error: str = ""


class StopRequested(msgspec.Struct, frozen=True, tag=True):
    """Request of a peer to stop the run. `save` is as in `Controller.stop`."""

    save: bool | None


class RunOpened(msgspec.Struct, frozen=True, tag=True):
    """Reply to `PeerHello`: the run is open. Has its pickled `RunDirectory`."""

    directory: bytes


class StartAttempt(msgspec.Struct, frozen=True, tag=True):
    """Command to start an attempt, with the pickled `WorkerAssignment`.

    The commands that follow belong to this attempt.
    """

    assignment: bytes


class CaptureStack(msgspec.Struct, frozen=True, tag=True):
    """Request for the stacks of the threads of this process."""

    request_id: int


class ExecuteFunction(msgspec.Struct, frozen=True, tag=True):
    """Request to call a serialized (function, args, kwargs) for a backend."""

    request_id: int
    call: Serialized


class EndRun(msgspec.Struct, frozen=True, tag=True):
    """Command to end the run, with the pickled `RunOutcome`. It is the last one."""

    outcome: bytes


PeerMessage = Message | FunctionCancelled | PeerReply | StopRequested
"""Messages of a peer after `PeerHello`."""

ReceivedMessage = PeerMessage | WorkerDied
"""Messages that rank 0 handles. `WorkerDied` reports that a connection ended; no peer sends it."""

PeerCommand = Command | RunOpened | StartAttempt | CaptureStack | ExecuteFunction | EndRun
"""Commands of rank 0."""

HELLO = Codec[PeerHello](PeerHello)
MESSAGES = Codec[PeerMessage](PeerMessage)
COMMANDS = Codec[PeerCommand](PeerCommand)
