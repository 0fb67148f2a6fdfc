"""`drawbar stop`: end a run in order."""

from __future__ import annotations

from typing import Annotated

import typer

from drawbar.cli._arguments import AsJson, RunName, command_errors, open_handle
from drawbar.cli._output import write_json


def stop(
    run: RunName,
    save: Annotated[
        bool, typer.Option("--save/--now", help="After its next checkpoint, or at once.")
    ] = True,
    as_json: AsJson = False,
) -> None:
    """End a run in order.

    It can be resumed. Of a detached run on the cluster that this machine is part of, or of any run
    of yours that goes on on this machine.
    """
    handle = open_handle(run)
    with command_errors():
        if not handle.is_done:
            handle.stop(save=save)
        status = handle.status
    if as_json:
        write_json({"name": handle.name, "path": handle.path, "status": status})
