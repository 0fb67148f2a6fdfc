"""drawbar stop: stop a run."""

from __future__ import annotations

from typing import Annotated

import typer

from drawbar.cli._arguments import AsJson, RunName, command_errors, open_handle
from drawbar.cli._output import write_json


def stop(
    run: RunName,
    save: Annotated[
        bool,
        typer.Option(
            "--save/--now", help="Request a checkpoint and stop after it, or stop immediately."
        ),
    ] = True,
    as_json: AsJson = False,
) -> None:
    """Stop a run.

    The run can be resumed later. Works for your runs on this machine, and for detached runs on the
    Ray cluster of this machine.
    """
    handle = open_handle(run)
    with command_errors():
        was_done = handle.is_done
        if not was_done:
            handle.stop(save=save)
        status = handle.status
    if as_json:
        write_json({"name": handle.name, "path": handle.path, "status": status})
    elif was_done:
        print(f"Run {handle.name!r} has already ended: {status}.")
    else:
        print(f"Stopping run {handle.name!r}. Its status is {status}.")
