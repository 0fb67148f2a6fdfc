"""`drawbar clean`: what runs leave behind and nobody needs any more."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Annotated

import typer
from rich.filesize import decimal

from drawbar.cli._arguments import AsJson, refusals_told
from drawbar.cli._output import CommandError, told_of, write_json, write_table
from drawbar.train import DamagedRunError, JournalLockedError
from drawbar.train.runs import Leftover, RunRecord, find_run, leftovers_here, list_runs

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
    with refusals_told():
        found = [each for run in _runs(storage) for each in run.leftovers(keep)]
        found += leftovers_here(older_than * _DAY)
    stays = _remove(found) if yes else {}
    gone = [each for each in found if each.path not in stays]
    if as_json:
        told = [{"what": each.what, "path": each.path, "bytes": each.nbytes} for each in gone]
        write_json({"deleted": yes, "found": told, "stays": stays})
    else:
        _write(gone, yes=yes)
    if stays:
        raise CommandError("; ".join(f"{path} stays: {why}" for path, why in stays.items()))


def _runs(storage: str) -> Iterator[RunRecord]:
    """Give the run that was named, or those of a storage, but for what links there lead to."""
    if "/" in storage:
        try:
            yield find_run(storage)
            return
        except LookupError:
            pass
    yield from (run for run in list_runs(storage) if not os.path.islink(run.path))


def _remove(found: list[Leftover]) -> dict[str, str]:
    """Delete what was found; gives what stays, by path, and why."""
    stays = {}
    for each in found:
        try:
            each.remove()
        except OSError as error:
            stays[each.path] = told_of(error)
        except (JournalLockedError, DamagedRunError) as error:
            stays[each.path] = str(error)
    return stays


def _write(found: list[Leftover], *, yes: bool) -> None:
    if not found:
        print("nothing to delete")
        return
    write_table([(decimal(each.nbytes), each.what, each.path) for each in found], whole=True)
    total = decimal(sum(each.nbytes for each in found))
    print(f"{total} deleted" if yes else f"{total} would be deleted; --yes deletes it")
