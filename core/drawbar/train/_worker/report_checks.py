"""Options of report() for a checkpoint, and their checks.

The checks run on the reporting rank before any file is changed and before any message is sent.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from drawbar._base.wording import is_encodable
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.contents import FileEntry
from drawbar._storage.run_files import RUN_FILE_NAMES
from drawbar.train._config.checkpoint_modes import CheckpointUploadMode

_MAX_NAME_BYTES = 255  # limit of common filesystems


CheckpointUploadFn = Callable[[Checkpoint, str], Checkpoint]
"""User function that uploads a checkpoint under a name and returns the uploaded checkpoint.

It may upload to the run's storage or elsewhere. If it returns its argument unchanged, and that is a
local directory outside the run, Drawbar copies the directory.
"""


@dataclass(frozen=True)
class BackgroundWrite:
    """Files that another process is writing to a directory.

    Attributes:
        files: The files.
        done: Future that has no result. Its exception states why the files are not written.
        report_index: Future with the number of the report. If it is cancelled, no restart reads the
            files from memory.
    """

    files: tuple[FileEntry, ...]
    done: Future[None]
    report_index: Future[int] = field(default_factory=Future)


@dataclass(frozen=True)
class UploadOptions:
    """Options of `report()` that determine how and where the checkpoint is stored.

    Attributes:
        name: Name of the checkpoint; None for the default name.
        mode: Upload mode.
        delete_local: Whether to move the directory; None for the default of the mode.
        upload_fn: Function that replaces Drawbar's upload.
        background: Write to the directory that is in progress.
    """

    name: str | None
    mode: CheckpointUploadMode
    delete_local: bool | None
    upload_fn: CheckpointUploadFn | None
    background: BackgroundWrite | None = None

    @property
    def is_blocking(self) -> bool:
        """True if `report()` waits for the commit."""
        return self.mode is not CheckpointUploadMode.ASYNC

    def check(self) -> None:
        """Check the options.

        Raises:
            TypeError: The mode is not a `CheckpointUploadMode`, or the upload function cannot be
                called with a checkpoint and a name.
            ValueError: The name is not a valid directory name, or is reserved for files of the run.
        """
        _check_upload_mode(self.mode)
        if self.upload_fn is not None:
            _check_upload_fn(self.upload_fn)
        if self.name is not None:
            _check_name(self.name)


def _check_upload_mode(mode: object) -> None:
    if not isinstance(mode, CheckpointUploadMode):
        raise TypeError(
            f"checkpoint_upload_mode must be a CheckpointUploadMode, found {mode!r}. "
            "Use CheckpointUploadMode.ASYNC, for example."
        )


def _check_name(name: str) -> None:
    plain = name == Path(name).name and name[:1] not in (".", "") and name not in RUN_FILE_NAMES
    if not plain or "\0" in name or not is_encodable(name) or len(name.encode()) > _MAX_NAME_BYTES:
        raise ValueError(
            f"checkpoint_dir_name={name!r} is not a valid name. Use a directory name without '/' "
            f"and without a leading '.', of at most {_MAX_NAME_BYTES} bytes in UTF-8. "
            f"Reserved names: {', '.join(RUN_FILE_NAMES)}"
        )


def _check_upload_fn(function: object) -> None:
    if not callable(function):
        raise TypeError(f"checkpoint_upload_fn must be a function, found {function!r}")
    try:
        signature = inspect.signature(function)
    except ValueError:
        return  # some functions written in C have no signature
    try:
        signature.bind(None, "")
    except TypeError as error:
        raise TypeError(
            "checkpoint_upload_fn must accept two arguments (checkpoint, name), but "
            f"{getattr(function, '__name__', function)}{signature} does not: {error}"
        ) from None
