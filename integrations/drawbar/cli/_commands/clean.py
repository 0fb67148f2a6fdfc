"""drawbar clean: list or delete files that runs no longer need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.filesize import decimal

from drawbar.cli._arguments import DEFAULT_STORAGE_HELP, AsJson, command_errors
from drawbar.cli._output import CommandError, format_os_error, write_json, write_table
from drawbar.train import DamagedRunError, RunInProgressError
from drawbar.train.runs import RunRecord, UnusedFile, find_run, find_unused_local_files, list_runs

_DAY = 86_400


def clean(
    storage: Annotated[
        str | None,
        typer.Argument(
            metavar="STORAGE",
            help=f"Storage directory or URI, or one run in it. {DEFAULT_STORAGE_HELP}",
        ),
    ] = None,
    keep: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=1,
            help="Delete all checkpoints of each run except the N best and the newest.",
        ),
    ] = None,
    older_than: Annotated[
        float,
        typer.Option(
            metavar="DAYS",
            min=0,
            help="Delete checkpoint copies and work directories only if they are older.",
        ),
    ] = 7,
    yes: Annotated[
        bool, typer.Option("--yes", help="Delete the files instead of listing them.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """List or delete files that runs no longer need.

    Without --yes, only lists the files. Deletes uncommitted files of runs that have ended and, with
    --keep, checkpoints of these runs. On this machine, also deletes temporary copies of
    checkpoints, stale sockets, and old work directories of runs on remote storage. Never deletes
    files of an active run.
    """
    with command_errors():
        files = [file for run in _find_runs(storage) for file in run.find_unused_files(keep)]
        files += find_unused_local_files(older_than * _DAY)
    failed = _delete_all(files) if yes else {}
    deleted = [file for file in files if file.path not in failed]
    if as_json:
        rows = [{"kind": file.kind, "path": file.path, "bytes": file.nbytes} for file in deleted]
        write_json({"deleted": yes, "files": rows, "failed": failed})
    else:
        _print_summary(deleted, yes=yes)
    if failed:
        reasons = "; ".join(f"{path}: {reason}" for path, reason in failed.items())
        raise CommandError(f"Could not delete {reasons}")


def _find_runs(storage: str | None) -> Iterator[RunRecord]:
    """Yield the named run, or all runs in a storage directory except symbolic links."""
    if storage is not None and ("/" in storage or not os.path.isdir(storage)):
        try:
            yield find_run(storage)
            return
        except LookupError:
            is_path = storage.startswith(("/", "~", ".")) or ":/" in storage
            if not is_path and not os.path.isdir(storage):
                raise
    yield from (run for run in list_runs(storage) if not os.path.islink(run.path))


def _delete_all(files: list[UnusedFile]) -> dict[str, str]:
    """Delete files. Returns the paths that could not be deleted, with the reasons."""
    failed = {}
    for file in files:
        try:
            file.remove()
        except OSError as error:
            failed[file.path] = format_os_error(error)
        except (RunInProgressError, DamagedRunError) as error:
            failed[file.path] = str(error)
    return failed


def _print_summary(files: list[UnusedFile], *, yes: bool) -> None:
    if not files:
        print("Nothing to delete.")
        return
    write_table(
        [(decimal(file.nbytes), file.kind, file.path) for file in files], keep_last_column=True
    )
    total = decimal(sum(file.nbytes for file in files))
    print(f"Deleted {total}." if yes else f"{total} can be deleted. Run again with --yes.")
