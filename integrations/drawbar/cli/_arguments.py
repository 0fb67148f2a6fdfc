"""What several commands are given, and the run that an argument names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from drawbar.cli._output import CommandError, format_os_error
from drawbar.train import CheckpointError
from drawbar.train.runs import RunRecord, find_run

if TYPE_CHECKING:
    from drawbar.train import RunHandle

RunName = Annotated[
    str, typer.Argument(metavar="RUN", help="Its name in ~/drawbar_results, its path or address.")
]
RunNames = Annotated[
    list[str],
    typer.Argument(metavar="RUN", help="Names in ~/drawbar_results, paths or addresses."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Write JSON, for programs.")]


def open_record(run: str) -> RunRecord:
    """Read the run that was named.

    Raises:
        CommandError: It is not there, or its storage refuses.
    """
    with command_errors():
        return find_run(run)


def open_handle(run: str) -> RunHandle:
    """Give a handle on the run that was named: the one that `open_record` reads, if there is one.

    Raises:
        CommandError: It is not there, was cut off, or does not answer, or its storage refuses.
    """
    from drawbar.train import attach

    with command_errors():
        try:
            path = find_run(run).path
        except LookupError as not_here:
            try:
                return attach(run)  # a detached one may lie where this machine does not see it
            except LookupError:
                raise not_here from None
        return attach(path)


@contextmanager
def command_errors() -> Iterator[None]:
    """Turn what a storage, or a run that is looked for, refuses into a `CommandError`."""
    try:
        yield
    except OSError as error:
        raise CommandError(format_os_error(error)) from error
    except (LookupError, ImportError, ValueError, CheckpointError) as error:
        raise CommandError(str(error)) from error
