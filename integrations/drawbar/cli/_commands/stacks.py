"""drawbar stacks: stack traces of all ranks of a running run."""

from __future__ import annotations

from typing import Annotated

import typer

from drawbar.cli._arguments import AsJson, RunName, command_errors, open_handle, open_record
from drawbar.cli._output import escape_lines, write_json

ShowAllThreads = Annotated[
    bool, typer.Option("--all", help="Show every thread, not only the one that trains.")
]


def stacks(run: RunName, show_all: ShowAllThreads = False, as_json: AsJson = False) -> None:
    """Show what every rank is doing, with the stack of its training thread.

    Works for your runs on this machine, and for detached runs on the Ray cluster of this machine.
    The stacks of all threads are saved in the run's `stacks` directory.
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
        shown = trace if show_all else _select_training_thread(trace)
        print(f"\nRank {rank}\n{escape_lines(shown.rstrip())}")
    if not show_all:
        print("\nTo show all threads, add --all.")


def _select_training_thread(trace: str) -> str:
    """Return the stack of the training thread, or all stacks if the rank does not train."""
    first, _, _ = trace.partition("\n\n")
    return first if first.partition("\n")[0].endswith("(training):") else trace
