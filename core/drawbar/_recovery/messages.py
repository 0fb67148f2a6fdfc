"""Messages and commands of an in-place recovery, which the protocol of the workers includes.

Each recovery has a generation, a number that increases with each death. Messages and commands of
an earlier generation are ignored.
"""

from __future__ import annotations

from typing import ClassVar

import msgspec


class RecoveryReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The training function of the rank waits for the new group.

    Attributes:
        generation: Generation of the group.
        address: Address through which the members connect. Only the leader sends it.
    """

    generation: int
    address: str = ""


class RecoveryDeclined(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank cannot recover in place, so that the attempt fails."""

    generation: int
    reason: str


class RecoveryFinished(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The rank trains in the new group. `stopped_seconds` is the time in which it did not."""

    generation: int
    stopped_seconds: float


class RankStalled(msgspec.Struct, frozen=True):
    """Other ranks wait for a call of the rank."""

    is_activity: ClassVar[bool] = False


class JoinTimedOut(msgspec.Struct, frozen=True):
    """The time in which new processes must become ready has passed since a death."""

    is_activity: ClassVar[bool] = False

    generation: int


RecoveryMessage = RecoveryReady | RecoveryDeclined | RecoveryFinished
"""Messages of a rank to the controller."""

RecoveryNotice = RankStalled | JoinTimedOut
"""Messages about a rank that the controller puts on its own queue."""


class RanksLost(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Ranks have died. The others leave collectives with them, and wait for the new group.

    Attributes:
        generation: Generation of the next group.
        leader: Lowest rank that has the state of the training. It opens the store of the group.
    """

    generation: int
    leader: int


class GroupFormed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """All members of the new group are ready to connect.

    Attributes:
        generation: Generation of the group.
        address: Address that the leader has sent.
    """

    generation: int
    address: str


RecoveryCommand = RanksLost | GroupFormed
"""Commands of the controller to a rank."""
