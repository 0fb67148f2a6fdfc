"""`drawbar stacks`: where every rank of a run stands that goes on."""

from __future__ import annotations

from drawbar.cli._arguments import AsJson, RunName, command_errors, open_handle, open_record
from drawbar.cli._output import CommandError, escape_lines, write_json


def stacks(run: RunName, as_json: AsJson = False) -> None:
    """Show where every rank stands, and its stacks.

    Of a detached run on the cluster that this machine is part of, or of any run of yours that goes
    on on this machine. What is shown is also written to the run's folder `stacks`.
    """
    handle = open_handle(run)
    with command_errors():
        try:
            difference = handle.diagnose()
        except RuntimeError as error:  # it is over
            raise CommandError(str(error)) from error
        found = open_record(handle.path).read_stacks()
    if as_json:
        write_json({"path": handle.path, "difference": difference, "stacks": found})
        return
    print(escape_lines(difference))
    for rank, text in found.items():
        print(f"\nrank {rank}\n{escape_lines(text.rstrip())}")
