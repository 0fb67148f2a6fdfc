"""Pytest plugin that replaces `torch.distributed.run.main` by `drawbar launch`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed.run
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from drawbar.cli import main

COMMAND_ERROR = "drawbar: error: "


def launch(arguments: Sequence[str] | None = None) -> None:
    """Run `drawbar launch` with the arguments of torchrun.

    Raises:
        ChildFailedError: The script has failed.
        ValueError: The arguments are wrong.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    with (
        tempfile.TemporaryDirectory() as directory,
        _error_file(Path(directory, "error.json")) as error_file,
        contextlib.redirect_stderr(io.StringIO()) as errors,
    ):
        try:
            main(["launch", "--storage-path", directory, *arguments])
        except SystemExit as end:
            if not end.code:
                return
            if errors.getvalue().startswith(COMMAND_ERROR):
                raise ValueError(errors.getvalue()) from None
            failure = ProcessFailure(0, 0, int(end.code), str(error_file))
            raise ChildFailedError("drawbar launch", {0: failure}) from None


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
