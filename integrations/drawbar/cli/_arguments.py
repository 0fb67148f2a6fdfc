"""Arguments, options, and run lookup shared by several commands."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import TYPE_CHECKING, Annotated

import typer

from drawbar.cli._output import CommandError, format_os_error
from drawbar.train.runs import RunRecord, find_run

if TYPE_CHECKING:
    from drawbar.train import RunHandle

DEFAULT_STORAGE_HELP = "Default: $DRAWBAR_STORAGE, or ~/drawbar_results."

Storage = Annotated[
    str | None,
    typer.Argument(metavar="STORAGE", help=f"Storage directory or URI. {DEFAULT_STORAGE_HELP}"),
]
RunName = Annotated[
    str,
    typer.Argument(
        metavar="RUN", help="Run name in the default storage path, run directory, or URI."
    ),
]
RunNames = Annotated[
    list[str],
    typer.Argument(metavar="RUN", help="Run names, run directories, or URIs."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def open_record(run: str) -> RunRecord:
    """Return the record of a run.

    Raises:
        CommandError: The run does not exist, or its storage cannot be read.
    """
    with command_errors():
        return find_run(run)


def open_handle(run: str) -> RunHandle:
    """Return a handle to a run. Prefers the run that `open_record` finds.

    Raises:
        CommandError: The run does not exist, was interrupted, or does not reply, or its storage
            cannot be read.
    """
    from drawbar.train import attach

    with command_errors():
        try:
            path = find_run(run).path
        except LookupError as not_found:
            try:
                return attach(run)  # a detached run's storage may be invisible to this machine
            except LookupError:
                raise not_found from None
        return attach(path)


@contextmanager
def command_errors() -> Iterator[None]:
    """Convert errors of runs, storage, and arguments to `CommandError`."""
    try:
        yield
    except OSError as error:
        raise CommandError(format_os_error(error)) from error
    except (ImportError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CommandError(str(error)) from error


def parse_env(assignments: Sequence[str]) -> dict[str, str]:
    """Return the variables of `--env NAME=VALUE`.

    Raises:
        CommandError: An assignment has another form.
    """
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise CommandError(
                f"--env must be NAME=VALUE, found {assignment!r}. Variables of this shell are "
                "forwarded anyway."
            )
        variables[name] = value
    return variables


def parse_stop_before(text: str | None) -> float | datetime | None:
    """Return the value of `--stop-before`: seconds or a time.

    Warns about seconds outside a Slurm job, and returns None.

    Raises:
        CommandError: It is neither.
    """
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        return _parse_time(text)
    if "SLURM_JOB_END_TIME" in os.environ:
        return seconds
    print(
        f"drawbar: warning: Ignoring --stop-before {text}: SLURM_JOB_END_TIME is not set, so this "
        "is not a Slurm job. Set --max-time, or a time such as 2030-01-01T08:00.",
        file=sys.stderr,
    )
    return None


def _parse_time(text: str) -> datetime:
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise CommandError(
            "--stop-before must be a number of seconds or a time such as 2030-01-01T08:00, "
            f"found {text!r}."
        ) from None
