"""All commands, and what is the same for each: help, completion, bad input.

A command is a function with typer's annotations in a file of its own, which imports Ray and
frameworks where it runs and not before: `drawbar runs` must not wait for what it does not need.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated, NoReturn

import typer

from drawbar.cli._commands.clean import clean
from drawbar.cli._commands.compare import compare
from drawbar.cli._commands.export import export
from drawbar.cli._commands.launch import LAUNCH_CONTEXT, LaunchCommand, launch
from drawbar.cli._commands.logs import logs
from drawbar.cli._commands.plot import plot
from drawbar.cli._commands.runs import runs
from drawbar.cli._commands.show import show
from drawbar.cli._commands.stacks import stacks
from drawbar.cli._commands.stop import stop
from drawbar.cli._commands.verify import verify
from drawbar.cli._doctor.command import doctor
from drawbar.cli._migrate.command import migrate
from drawbar.cli._output import CommandError, escape_control_chars, format_os_error

app = typer.Typer(
    name="drawbar",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain text: it fits any terminal, and Rich takes long to import
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        typer.echo(f"drawbar {version('drawbar')}")
        raise typer.Exit


@app.callback()
def _root_command(
    _: Annotated[
        bool,
        typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version."),
    ] = False,
) -> None:
    """Train on Ray, and look at the runs that were made."""


app.command(cls=LaunchCommand, context_settings=LAUNCH_CONTEXT)(launch)

COMMANDS = (
    runs,
    show,
    logs,
    stacks,
    stop,
    compare,
    plot,
    export,
    verify,
    clean,
    doctor,
    migrate,
)
"""In the order in which the help shows them."""

for command in COMMANDS:
    app.command()(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command `drawbar` and exit.

    Args:
        arguments: What stands behind `drawbar`; None takes it from the command line.

    Raises:
        SystemExit: The command has ended: 0 if it did what it was asked, 2 if it was asked for
            what is not there, with one line on stderr that says so.
    """
    _configure_streams()
    try:
        try:
            app(arguments, prog_name="drawbar")
        finally:
            sys.stdout.flush()  # a full disk is told here, and not when Python ends
    except CommandError as error:
        _exit_with_error(" ".join(str(error).split()))
    except BrokenPipeError:  # `drawbar runs | head`
        _discard_stdout()
        sys.exit(1)
    except OSError as error:
        _discard_stdout()
        _exit_with_error(format_os_error(error))


def _configure_streams() -> None:
    """Have all that is written go somewhere, also what an old terminal's encoding does not know."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # the shell has closed it: `drawbar runs >&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # it stays
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _exit_with_error(line: str) -> NoReturn:
    print(f"drawbar: {escape_control_chars(line)}", file=sys.stderr)
    sys.exit(2)


def _discard_stdout() -> None:
    """Have nothing more written to stdout, also not by Python when it ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
