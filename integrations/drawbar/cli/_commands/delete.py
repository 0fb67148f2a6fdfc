"""drawbar delete: delete runs."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.filesize import decimal

from drawbar.cli._arguments import AsJson, RunNames, open_record
from drawbar.cli._output import CommandError, escape_control_chars, format_os_error, write_json
from drawbar.train import DamagedRunError, RunInProgressError
from drawbar.train.runs import RunRecord


def delete(
    names: RunNames,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Delete a run in an object store that has not ended, if it is dead."
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Delete runs that have ended, with their checkpoints, reports, and logs.

    Deletes everything in the run directories. Checkpoints that were committed in other directories
    are not deleted.
    """
    records = {record.path: record for record in map(open_record, names)}
    sizes = {path: record.compute_size() for path, record in records.items()}
    if not yes:
        _confirm([(record, sizes[path]) for path, record in records.items()])
    failed = _delete_all(records, force=force)
    deleted = [path for path in records if path not in failed]
    if as_json:
        rows = [
            {"name": records[path].name, "path": path, "bytes": sizes[path]} for path in deleted
        ]
        write_json({"deleted": rows, "failed": failed})
    elif deleted:
        text = ", ".join(repr(records[path].name) for path in deleted)
        size = decimal(sum(sizes[path] for path in deleted))
        print(f"Deleted {escape_control_chars(text)} ({size}).")
    if failed:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in failed.items())
        raise CommandError(f"Could not delete {reasons}")


def _confirm(rows: list[tuple[RunRecord, int]]) -> None:
    """Ask whether to delete runs.

    Raises:
        CommandError: There is no terminal to ask on.
        typer.Abort: The reply is not yes.
    """
    if not sys.stdin.isatty():
        raise CommandError(
            "A deletion must be confirmed, and standard input is not a terminal. Pass --yes."
        )
    for record, size in rows:
        num_checkpoints = len(record.list_checkpoints())
        text = f"{record.path}: {record.status}, {decimal(size)}, {num_checkpoints} checkpoints"
        print(escape_control_chars(text), file=sys.stderr)
    runs = "this run" if len(rows) == 1 else f"these {len(rows)} runs"
    typer.confirm(f"Delete {runs}?", abort=True, err=True)


def _delete_all(records: dict[str, RunRecord], *, force: bool) -> dict[str, str]:
    """Delete runs. Returns the paths that could not be deleted, with the reasons."""
    failed = {}
    for path, record in records.items():
        try:
            record.delete(force=force)
        except OSError as error:
            failed[path] = format_os_error(error)
        except (RunInProgressError, DamagedRunError, ValueError) as error:
            failed[path] = str(error)
    return failed
