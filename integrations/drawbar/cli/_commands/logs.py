"""`drawbar logs`: what a rank has written."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from drawbar.cli._arguments import RunName, command_errors, open_record
from drawbar.cli._output import CommandError, write_json
from drawbar.train.runs import RunRecord


def logs(
    run: RunName,
    rank: Annotated[int, typer.Option(min=0, help="Whose.")] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run is over.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the lines as JSON.")] = False,
) -> None:
    """Write what a rank has written."""
    record = open_record(run)
    if follow and as_json:
        raise CommandError("--json writes a whole document: it does not go with --follow")
    if follow:
        for written in _follow_log(record, rank):
            _print_bytes(written)
        return
    with command_errors():
        log = record.read_log(rank)
    if log is None:
        workers = max((each.world_size for each in record.timeline.attempts), default=0)
        raise CommandError(f"{record.path} has no log of rank {rank}; it had {workers} workers")
    if as_json:
        write_json(log.decode(errors="replace").splitlines())
    else:
        _print_bytes(log)


def _follow_log(record: RunRecord, rank: int) -> Iterator[bytes]:
    with command_errors():
        yield from record.follow_log(rank)


def _print_bytes(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
