"""Read the latest collectives of this process from torch's flight recorder.

The recorder is part of `torch.distributed` and records each collective when a rank enters it, and
when it ends. It is on by default: torch 2.13 keeps the last 2,000 collectives of NCCL and gloo
(TORCH_FR_BUFFER_SIZE). So the diagnosis of hangs costs nothing during training.

The recorder lives as long as the process. So it has also the collectives of earlier attempts and of
destroyed groups with the same names.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec

from drawbar.torch._compat import Group, dump_flight_recorders, get_groups
from drawbar.train.backend import GroupCalls, collective_calls


class _Entry(msgspec.Struct):
    """Recorded collective; torch's names, of which only these are read."""

    collective_seq_id: int
    is_p2p: bool
    pg_id: int  # number of the group's backend, in the order of their creation in this process
    process_group: tuple[str, str]  # name and description
    profiling_name: str  # such as "gloo:all_reduce"
    record_id: int
    retired: bool  # torch no longer watches it: it has ended
    state: str
    time_created_ns: int

    @property
    def backend(self) -> str:
        return self.profiling_name.partition(":")[0]

    @property
    def name(self) -> str:
        return self.profiling_name.rpartition(":")[2]

    @property
    def has_ended(self) -> bool:
        return self.retired or self.state == "completed"


class _Dump(msgspec.Struct):
    entries: list[_Entry] = []  # the oldest first

    def is_complete_since(self, start_ns: int) -> bool:
        """Return whether no entry since then is lost: a full recorder overwrites the oldest."""
        first = self.entries[0] if self.entries else None
        return first is None or first.record_id == 0 or first.time_created_ns < start_ns


# Once for all threads: msgspec can crash if two threads use a type for the first time.
_dump_decoder = msgspec.json.Decoder(_Dump)


@contextmanager
def flight_recorder() -> Iterator[None]:
    """Include the collectives of the process groups created from now on in diagnoses of hangs."""
    start_ns = time.time_ns()
    with collective_calls(lambda: _read_calls(start_ns)):
        yield


def _read_calls(start_ns: int) -> list[GroupCalls]:
    try:
        groups = get_groups()
        dumps = [_dump_decoder.decode(dump) for dump in dump_flight_recorders()]
    except (msgspec.MsgspecError, AttributeError, KeyError, RuntimeError, ValueError):
        return []  # another version of torch, or the groups have just been destroyed
    # Otherwise, a group without entries may have had some.
    is_complete = all(dump.is_complete_since(start_ns) for dump in dumps)
    entries: dict[tuple[str, str], list[_Entry]] = {}  # by group and backend
    for entry in (entry for dump in dumps for entry in dump.entries):
        if not entry.is_p2p and entry.time_created_ns >= start_ns:
            entries.setdefault((entry.process_group[0], entry.backend), []).append(entry)
    return [
        _make_group_calls(group, backend, recorded)
        for group in groups
        for backend in group.backends
        if (recorded := entries.get((group.name, backend), [])) or is_complete
    ]


def _make_group_calls(group: Group, backend: str, entries: list[_Entry]) -> GroupCalls:
    is_described = group.description != "undefined"  # torch's default
    description = f"{group.description}, {backend}" if is_described else backend
    latest_id = max((entry.pg_id for entry in entries), default=0)  # others have been destroyed
    # The last entry of a number has its state: it can combine the ones before.
    calls = {entry.collective_seq_id: entry for entry in entries if entry.pg_id == latest_id}
    return GroupCalls(
        group=f"{group.name} ({description})",
        ranks=group.ranks,
        names={number: call.name for number, call in sorted(calls.items())},
        waiting_in=min((n for n, call in calls.items() if not call.has_ended), default=None),
    )
