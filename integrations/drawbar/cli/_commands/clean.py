"""`drawbar clean`: what runs leave behind and nobody needs any more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.filesize import decimal

from drawbar.cli._arguments import AsJson, command_errors
from drawbar.cli._output import CommandError, format_os_error, write_json, write_table
from drawbar.train import DamagedRunError, RunInProgressError
from drawbar.train.runs import RunRecord, UnusedFile, find_run, find_unused_local_files, list_runs

_DAY = 86_400


def clean(
    storage: Annotated[
        str, typer.Argument(metavar="STORAGE", help="A storage path, or one run in it.")
    ] = "~/drawbar_results",
    keep: Annotated[
        int | None,
        typer.Option(min=1, help="Checkpoints of each run that stay: the best, and the newest."),
    ] = None,
    older_than: Annotated[
        float, typer.Option(metavar="DAYS", min=0, help="For copies and work folders here.")
    ] = 7,
    yes: Annotated[bool, typer.Option("--yes", help="Delete it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Say what may be deleted, or delete it.

    That is: what runs that do not go on never committed; checkpoints beyond --keep; on this machine
    copies of remote checkpoints, sockets of processes that are gone, and old work folders of runs
    on remote storage.
    """
    with command_errors():
        found = [each for run in _find_runs(storage) for each in run.find_unused_files(keep)]
        found += find_unused_local_files(older_than * _DAY)
    failed = _delete_all(found) if yes else {}
    deleted = [each for each in found if each.path not in failed]
    if as_json:
        told = [{"what": each.kind, "path": each.path, "bytes": each.nbytes} for each in deleted]
        write_json({"deleted": yes, "found": told, "stays": failed})
    else:
        _print_summary(deleted, yes=yes)
    if failed:
        raise CommandError("; ".join(f"{path} stays: {why}" for path, why in failed.items()))


def _find_runs(storage: str) -> Iterator[RunRecord]:
    """Give the run that was named, or those of a storage, but for what links there lead to."""
    if "/" in storage:
        try:
            yield find_run(storage)
            return
        except LookupError:
            pass
    yield from (run for run in list_runs(storage) if not os.path.islink(run.path))


def _delete_all(found: list[UnusedFile]) -> dict[str, str]:
    """Delete what was found; gives what stays, by path, and why."""
    failed = {}
    for each in found:
        try:
            each.remove()
        except OSError as error:
            failed[each.path] = format_os_error(error)
        except (RunInProgressError, DamagedRunError) as error:
            failed[each.path] = str(error)
    return failed


def _print_summary(found: list[UnusedFile], *, yes: bool) -> None:
    if not found:
        print("nothing to delete")
        return
    write_table(
        [(decimal(each.nbytes), each.kind, each.path) for each in found], keep_last_column=True
    )
    total = decimal(sum(each.nbytes for each in found))
    print(f"{total} deleted" if yes else f"{total} would be deleted; --yes deletes it")
