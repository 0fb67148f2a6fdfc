"""drawbar logs: print the output of a rank."""

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
    rank: Annotated[int, typer.Option(metavar="N", min=0, help="Rank whose output to print.")] = 0,
    follow: Annotated[
        bool,
        typer.Option("--follow", "-f", help="Keep printing new output until the run ends."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the lines as a JSON list.")
    ] = False,
) -> None:
    """Print the output of a rank."""
    record = open_record(run)
    if follow and as_json:
        raise CommandError("--json cannot be combined with --follow.")
    if follow:
        for output in _follow_log(record, rank):
            _print_bytes(output)
        return
    with command_errors():
        log = record.read_log(rank)
    if log is None:
        workers = max((attempt.world_size for attempt in record.timeline.attempts), default=0)
        raise CommandError(
            f"Run {record.path} has no log for rank {rank}. It had {workers} workers."
        )
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
