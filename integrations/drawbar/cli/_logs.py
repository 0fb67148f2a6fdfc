"""`drawbar logs`: what a rank has written."""

from __future__ import annotations

import sys
import time
from typing import Annotated

import typer

from drawbar.cli._arguments import RunName, record_of, refusals_told
from drawbar.cli._output import CommandError, write_json
from drawbar.train.runs import RunRecord

_PERIOD_S = 0.2


def logs(
    run: RunName,
    rank: Annotated[int, typer.Option(min=0, help="Whose.")] = 0,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run is over.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Write the lines as JSON.")] = False,
) -> None:
    """Write what a rank has written."""
    record = record_of(run)
    if follow and as_json:
        raise CommandError("--json writes a whole document: it does not go with --follow")
    if follow:
        _follow(run, rank)
        return
    log = _log(record, rank)
    if log is None:
        workers = max((each.world_size for each in record.timeline.attempts), default=0)
        raise CommandError(f"{record.path} has no log of rank {rank}; it had {workers} workers")
    if as_json:
        write_json(log.decode(errors="replace").splitlines())
    else:
        _write(log)


def _follow(run: str, rank: int) -> None:
    written = 0
    while True:
        record = record_of(run)  # before its log: all of that is written when it is over
        log = _log(record, rank) or b""
        _write(log[written:])
        written = len(log)
        if record.status not in ("starting", "running", "restarting"):
            return
        time.sleep(_PERIOD_S)


def _log(record: RunRecord, rank: int) -> bytes | None:
    with refusals_told():
        return record.log(rank)


def _write(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
