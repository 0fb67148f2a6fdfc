"""drawbar logs: print the output of a rank."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from typing import Annotated

import typer

from drawbar.cli._arguments import RunName, command_errors, open_record
from drawbar.cli._output import CommandError, escape_lines, write_json
from drawbar.train.runs import RunRecord


def logs(
    run: RunName,
    rank: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Rank whose output to print.",
            show_default="the rank of the root cause in a failed run, else 0",
        ),
    ] = None,
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
    root_cause_rank = _find_root_cause_rank(record) if rank is None else None
    rank = rank or root_cause_rank or 0
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
        return
    if root_cause_rank is not None:
        print(f"Rank {rank} caused the failure of the run. Its output:", file=sys.stderr)
    _print_bytes(log)
    if root_cause_rank is not None and not log.rstrip().endswith(record.error.encode().rstrip()):
        _print_bytes(f"\n{escape_lines(record.error)}\n".encode(errors="replace"))


def _find_root_cause_rank(record: RunRecord) -> int | None:
    """Return the rank of the root cause of a failed run; None if no rank caused the failure."""
    attempts = record.timeline.attempts
    outcome = attempts[-1].outcome if record.status == "failed" and attempts else ""
    match = re.match(r"failed: rank (\d+): ", outcome)
    return int(match[1]) if match else None


def _follow_log(record: RunRecord, rank: int) -> Iterator[bytes]:
    with command_errors():
        yield from record.follow_log(rank)


def _print_bytes(data: bytes) -> None:
    sys.stdout.flush()
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()
