"""The `drawbar` command: subcommands, error handling, and exit codes.

Each subcommand is a function with Typer annotations in a separate module. These modules import Ray
and frameworks only inside the function, so that fast commands such as `drawbar runs` stay fast.
"""

from __future__ import annotations

import io
import os
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from drawbar.cli._commands.clean import clean
from drawbar.cli._commands.compare import compare
from drawbar.cli._commands.delete import delete
from drawbar.cli._commands.export import export
from drawbar.cli._commands.launch import LAUNCH_CONTEXT, LaunchCommand, launch
from drawbar.cli._commands.logs import logs
from drawbar.cli._commands.plot import plot
from drawbar.cli._commands.runs import runs
from drawbar.cli._commands.show import show
from drawbar.cli._commands.stacks import stacks
from drawbar.cli._commands.stop import stop
from drawbar.cli._commands.track import track
from drawbar.cli._commands.ui import ui
from drawbar.cli._commands.verify import verify
from drawbar.cli._doctor.command import doctor
from drawbar.cli._migrate.command import migrate
from drawbar.cli._output import (
    CommandError,
    discard_output,
    escape_control_chars,
    format_os_error,
)

_SYNONYMS = {
    "list": "runs",
    "ls": "runs",
    "ps": "runs",
    "status": "show",
    "info": "show",
    "describe": "show",
    "inspect": "show",
    "tail": "logs",
    "output": "logs",
    "metrics": "plot",
    "diff": "compare",
    "kill": "stop",
    "cancel": "stop",
    "rm": "delete",
    "remove": "delete",
    "prune": "clean",
    "train": "launch",
    "run": "launch",
    "start": "launch",
    "submit": "launch",
    "dashboard": "ui",
    "web": "ui",
    "check": "doctor",
}
"""Commands to suggest for the names that similar tools use."""


class _CommandGroup(TyperGroup):
    """Commands, of which an error suggests one for the name of another tool."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the arguments name."""
        try:
            return super().resolve_command(ctx, args)
        except _UsageError as error:
            if args[0] in _SYNONYMS:
                reason = error.format_message().partition(".")[0]
                error.message = f"{reason}. Did you mean {_SYNONYMS[args[0]]!r}?"
            raise


app = typer.Typer(
    name="drawbar",
    cls=_CommandGroup,
    invoke_without_command=True,
    rich_markup_mode=None,  # plain text works in every terminal, and importing Rich is slow
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(is_requested: bool) -> None:
    if is_requested:
        from importlib.metadata import version

        typer.echo(f"drawbar {version('drawbar')}")
        raise typer.Exit


_UsageError: Any = typer.BadParameter.__base__
"""Base class of Typer's errors in arguments, for which Typer has no public name."""


@app.callback()
def _root_command(
    context: typer.Context,
    _: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version and exit."
        ),
    ] = False,
) -> None:
    """Run training scripts on Ray and inspect training runs."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit(2)


app.command(cls=LaunchCommand, context_settings=LAUNCH_CONTEXT)(launch)

_EXIT_SIGPIPE = 141  # 128 + signal number, as in a shell

COMMANDS = (
    runs,
    show,
    ui,
    logs,
    stacks,
    stop,
    compare,
    plot,
    export,
    track,
    verify,
    clean,
    delete,
    doctor,
    migrate,
)
"""Subcommands, in the order of the help text."""

for command in COMMANDS:
    app.command()(command)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the `drawbar` command and exit the process.

    Args:
        arguments: Command line arguments without the program name. Default: `sys.argv[1:]`.

    Raises:
        SystemExit: Always. The code is 0 on success, 1 for a negative result (for example a
            damaged checkpoint), 2 for an error, which is printed to stderr in one line, 130 for
            Ctrl-C, and 141 if the reader of the output has ended, as in `drawbar runs | head`.
            `launch` exits with the code of the script.

    Example:
        ```python
        from drawbar.cli import main

        main(["runs", "/shared/runs", "--json"])
        ```
    """
    _configure_streams()
    try:
        _run(arguments)
    except BrokenPipeError:  # of stdout, or of stderr: `drawbar runs 2>&1 | head`
        discard_output()
        sys.exit(_EXIT_SIGPIPE)


def _run(arguments: Sequence[str] | None) -> NoReturn:
    """Run the command. Raises BrokenPipeError if the reader of its output has ended."""
    try:
        try:
            # Not Typer's standalone mode, which prints errors in arguments in several lines.
            code = app(arguments, prog_name="drawbar", standalone_mode=False)
        finally:
            sys.stdout.flush()  # raises here if the disk is full, instead of at interpreter exit
        sys.exit(code)
    except CommandError as error:
        if os.environ.get("DRAWBAR_FULL_TRACEBACK") == "1":
            traceback.print_exception(error)
        _exit_with_error(" ".join(str(error).split()))
    except _UsageError as error:
        _exit_with_error(_describe_usage_error(error))
    except typer.Abort as abort:  # Ctrl-C, or no answer to a question
        print("Aborted.", file=sys.stderr)
        is_interrupted = isinstance(abort.__cause__ or abort.__context__, KeyboardInterrupt)
        sys.exit(130 if is_interrupted else 1)
    except SystemExit as error:
        if isinstance(error.__context__, BrokenPipeError):  # Typer has replaced it
            raise error.__context__ from None
        raise
    except BrokenPipeError:
        raise
    except OSError as error:
        discard_output()
        _exit_with_error(format_os_error(error))


def _configure_streams() -> None:
    """Replace closed streams, and escape characters that the terminal cannot encode.

    With PYTHONUNBUFFERED, output that cannot be written is discarded. Standard output therefore
    gets a buffer that keeps it, and the flush at the end of the command raises the error.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the shell: `drawbar runs >&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # open until the process ends
        elif isinstance(stream, io.TextIOWrapper):
            if name == "stdout" and isinstance(stream.buffer, io.RawIOBase):
                buffered = open(stream.fileno(), "wb", closefd=False)  # noqa: SIM115  # as above
                stream = io.TextIOWrapper(buffered, stream.encoding, line_buffering=True)
                sys.stdout = stream
            stream.reconfigure(errors="backslashreplace")


def _describe_usage_error(error: Any) -> str:
    command = "drawbar" if error.ctx is None else error.ctx.command_path
    message = " ".join(error.format_message().split()).rstrip(".")
    end = "" if message.endswith(("?", ")")) else "."
    return f"{message}{end} For the arguments, run: {command} --help"


def _exit_with_error(line: str) -> NoReturn:
    print(f"drawbar: error: {escape_control_chars(line)}", file=sys.stderr)
    sys.exit(2)
