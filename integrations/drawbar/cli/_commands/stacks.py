"""drawbar stacks: stack traces of all ranks of a running run."""

from __future__ import annotations

from drawbar.cli._arguments import AsJson, RunName, command_errors, open_handle, open_record
from drawbar.cli._output import escape_lines, write_json


def stacks(run: RunName, as_json: AsJson = False) -> None:
    """Show what every rank is doing, with stack traces.

    Works for your runs on this machine, and for detached runs on the Ray cluster of this machine.
    The stack traces are also saved in the run's `stacks` directory.
    """
    handle = open_handle(run)
    with command_errors():
        summary = handle.diagnose()
        traces = open_record(handle.path).read_stacks()
    if as_json:
        write_json({"path": handle.path, "summary": summary, "stacks": traces})
        return
    print(escape_lines(summary))
    for rank, trace in traces.items():
        print(f"\nRank {rank}\n{escape_lines(trace.rstrip())}")
