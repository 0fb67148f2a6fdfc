"""Pytest plugin that replaces `torch.distributed.run.main` by `drawbar launch`."""

from __future__ import annotations

import contextlib
import io
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed.run
from torch.distributed.elastic import events
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from drawbar.cli import _torchrun, main
from drawbar.train.runs import RunRecord, list_runs

COMMAND_ERROR, COMMAND_ERROR_CODE = "drawbar: error: ", 2
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE)


def launch(args: Sequence[str] | None = None) -> None:
    """Run `drawbar launch` with the arguments of torchrun.

    Raises:
        ChildFailedError: The script has failed.
        ValueError: The arguments are wrong.
    """
    # Both use the entry points that a test defines.
    _torchrun.metadata = torch.distributed.run.metadata
    with (
        tempfile.TemporaryDirectory() as directory,
        _error_file(Path(directory, "error.json")) as error_file,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        code = _run_command(["--storage-path", directory, *(args or sys.argv[1:])])
        for run in list_runs(directory):
            _record_end(run)
    print(errors.getvalue(), end="", file=sys.stderr)
    if code == COMMAND_ERROR_CODE and COMMAND_ERROR in errors.getvalue():
        raise ValueError(errors.getvalue())
    if code:
        failure = ProcessFailure(0, 0, code, str(error_file))
        raise ChildFailedError("drawbar launch", {0: failure})


def _run_command(arguments: Sequence[str]) -> int:
    """Run `drawbar launch` in this process, and return its exit code."""
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        main(["launch", *arguments])
    except SystemExit as end:
        return int(end.code or 0)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _record_end(run: RunRecord) -> None:
    """Record the end of a run as torchrun does: an event of the launcher."""
    event = events.Event(
        name="drawbar.launch", source=events.EventSource.AGENT, metadata={"state": run.status}
    )
    events.record(event)


@contextlib.contextmanager
def _error_file(path: Path) -> Iterator[Path]:
    """Let the launcher write the first error of a script to a file."""
    previous = os.environ.get("TORCHELASTIC_ERROR_FILE")
    os.environ["TORCHELASTIC_ERROR_FILE"] = str(path)
    yield path
    if previous is not None:
        os.environ["TORCHELASTIC_ERROR_FILE"] = previous
    else:
        del os.environ["TORCHELASTIC_ERROR_FILE"]


torch.distributed.run.main = launch
