"""Error files of torchelastic: JSON files with the exception of a process.

`torch.distributed.elastic.multiprocessing.errors.record` writes one to TORCHELASTIC_ERROR_FILE.
"""

from __future__ import annotations

import json
import os
from typing import Any

from drawbar.train import ProgramFailedError, TrainingFailedError, WorkerGroupError

ERROR_FILE_VARIABLE = "TORCHELASTIC_ERROR_FILE"


def add_recorded_error(error: ProgramFailedError, path: str) -> ProgramFailedError:
    """Return the error of a program with the message and traceback of its error file.

    Args:
        error: Error of a program, which may not be a Python script.
        path: The error file.

    Returns:
        The same error if it has a traceback, or if the program has not written a valid file.
    """
    if error.traceback:
        return error
    try:
        with open(path) as file:
            content: Any = json.load(file)["message"]
        if isinstance(content, str):
            content = {"message": content}
        name, _, message = content["message"].partition(": ")
        traceback = content.get("extraInfo", {}).get("py_callstack", "")
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return error
    return ProgramFailedError(message, name, error.exit_code, error.time, traceback)


def write_error_file(error: TrainingFailedError, exit_code: int) -> None:
    """Write the error of the rank that failed first to the error file of this process, if any.

    Schedulers such as TorchX set TORCHELASTIC_ERROR_FILE for the launcher and read the file.

    Args:
        error: Error that `ScriptTrainer.fit()` raised.
        exit_code: Exit code of this process.

    Raises:
        OSError: The file cannot be written.
    """
    path = os.environ.get(ERROR_FILE_VARIABLE)
    if not path:
        return
    message, traceback, time = str(error), "", None
    if isinstance(error, WorkerGroupError) and error.failures:
        first = error.failures[0]
        message = first.headline()
        failure = error.worker_failures.get(first.rank)
        if isinstance(failure, ProgramFailedError):
            message = f"{failure.type_name}: {failure}"
            traceback, time = failure.traceback, failure.time
    details = {"py_callstack": traceback, "timestamp": str(int(time or 0))}
    content = {"message": {"message": message, "extraInfo": details, "errorCode": exit_code}}
    with open(path, "w") as file:
        json.dump(content, file)
