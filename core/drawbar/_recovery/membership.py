"""Membership of the ranks of an attempt during in-place recoveries. No Ray, I/O, or clock.

1. A rank dies. A new process starts for it, and the other ranks receive `RanksLost`.
2. Each rank stops at the next point at which it can join a group, and sends `RecoveryReady`.
3. When all ranks are ready, they receive `GroupFormed`, connect, and continue.
4. Each rank sends `RecoveryFinished` when it has trained in the new group.

A death in the meantime begins the next generation, in which all ranks must be ready again.
"""

from __future__ import annotations

from drawbar._recovery.messages import (
    GroupFormed,
    RanksLost,
    RecoveryFinished,
    RecoveryReady,
)


class Membership:
    """Ranks that have the state of the training, and ranks that are ready for the next group.

    Args:
        world_size: Number of ranks.

    Attributes:
        generation: Number of deaths so far.
        replaced: Ranks with a new process that has not received the state yet.
        is_recovering: Whether a recovery has begun that not all ranks have finished.
        stopped_seconds: Longest time in which a rank did not train in the current recovery.
    """

    def __init__(self, world_size: int) -> None:
        self.generation = 0
        self.replaced: set[int] = set()
        self.is_recovering = False
        self.stopped_seconds = 0.0
        self._ranks = range(world_size)
        self._address = ""
        self._ready: set[int] = set()
        self._unfinished: set[int] = set()

    def on_death(self, rank: int) -> RanksLost | None:
        """Record a death. Return the command for all other ranks; None if no rank survives."""
        if not self.is_recovering:
            self.stopped_seconds = 0.0
        self.generation += 1
        self.replaced.add(rank)
        self._ready.clear()
        self._unfinished = set(self._ranks)
        self.is_recovering = True
        return self.make_command() if len(self.replaced) < len(self._ranks) else None

    def make_command(self) -> RanksLost:
        """Return the command that announces the current generation."""
        leader = min(rank for rank in self._ranks if rank not in self.replaced)
        return RanksLost(generation=self.generation, leader=leader)

    def on_ready(self, rank: int, message: RecoveryReady) -> GroupFormed | None:
        """Record that a rank is ready. Return the command for all ranks if it was the last one."""
        if message.generation != self.generation or not self.is_recovering:
            return None
        self._ready.add(rank)
        self._address = message.address or self._address
        if len(self._ready) < len(self._ranks):
            return None
        return GroupFormed(generation=self.generation, address=self._address)

    def is_waiting_for(self, rank: int, generation: int) -> bool:
        """Return whether a group of this generation waits for a rank."""
        is_current = generation == self.generation and self.is_recovering
        return is_current and rank not in self._ready

    def list_late(self, generation: int) -> list[int]:
        """Return the ranks whose new processes are not ready for the group of a generation."""
        is_current = generation == self.generation and self.is_recovering
        return sorted(self.replaced - self._ready) if is_current else []

    def on_finished(self, rank: int, message: RecoveryFinished) -> bool:
        """Record that a rank has finished the recovery. Return whether it was the last one."""
        self.replaced.discard(rank)  # it has the state, also if another rank has died since
        if message.generation != self.generation or not self.is_recovering:
            return False
        self.stopped_seconds = max(self.stopped_seconds, message.stopped_seconds)
        self._unfinished.discard(rank)
        self.is_recovering = bool(self._unfinished)
        return not self.is_recovering
