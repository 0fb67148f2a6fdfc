"""The manifest of a checkpoint: what it consists of, and whether all of that is there."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path

import msgspec

from drawbar.train._errors import CheckpointError, UnsupportedFormatError
from drawbar.train._metrics import Metrics, decode_non_finite, encode_non_finite
from drawbar.train._storage.contents import (
    CHECKSUMS_FILE,
    MANIFEST_FILE,
    METADATA_FILE,
    VALIDATION_FILE,
    FileEntry,
    check_checkpoint_name,
    check_relative_path,
    is_reserved,
)
from drawbar.train._storage.files import (
    NOT_A_FILE_ERRNOS,
    fsync_path,
    fsync_tree,
    read_regular_file,
    write_atomically,
)
from drawbar.train._storage.filesystem import RemotePath


class ReportedCheckpointStatus(Enum):
    """How far a reported checkpoint is.

    COMMITTED: it is saved, and no validation was asked for. The others are saved too.
    PENDING_VALIDATION: its validation has not ended. VALIDATED: the validation's metrics are among
    its own. VALIDATION_TIMEOUT: the validation took longer than its `timeout_s`. VALIDATION_FAILED:
    the validation raised, or its process died.
    """

    COMMITTED = "COMMITTED"
    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
    VALIDATION_FAILED = "VALIDATION_FAILED"


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """A validation of one checkpoint: what it is called with, and what came of it.

    `metrics` are those that the function returned, `error` is why there are none, and `seconds` is
    how long it took, the waiting for resources included.
    """

    fn_kwargs: dict[str, object] = {}
    timeout_s: float | None = None
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.PENDING_VALIDATION
    metrics: Metrics = {}
    error: str = ""
    seconds: float = 0.0

    def with_success(self, metrics: Metrics) -> Validation:
        """Give the validation as it has ended well."""
        status = ReportedCheckpointStatus.VALIDATED
        return msgspec.structs.replace(self, status=status, metrics=metrics)

    def with_failure(self, error: str) -> Validation:
        """Give the validation as it has failed."""
        status = ReportedCheckpointStatus.VALIDATION_FAILED
        return msgspec.structs.replace(self, status=status, error=error)

    def with_timeout(self) -> Validation:
        """Give the validation as its time, which is limited, is over."""
        return msgspec.structs.replace(
            self,
            status=ReportedCheckpointStatus.VALIDATION_TIMEOUT,
            error=f"it took longer than timeout_s={self.timeout_s:g}",
        )


MANIFEST_FORMAT = 1
"""Format version of manifests. New optional fields do not change it."""

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, CheckpointError)
"""What decoding raises for data that is damaged, or names what it must not."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content of a checkpoint. Writing it is the commit: without it there is no checkpoint.

    Attributes:
        name: Name of its directory in the run, or its location elsewhere (`places.py`).
        index: Number of its report.
        attempt: Number of the attempt that reported it.
        world_size: Number of ranks of that attempt.
        time: Time of the commit, in seconds since the epoch.
        files: The user's files.
        metrics: Reported metrics. A finished validation adds its metrics.
        positions: Positions in the datasets.
        run_id: Identifier of the run.
        validation: None if no validation was requested.
        format_version: Format version of the manifest.
    """

    name: str
    index: int
    attempt: int
    world_size: int
    time: float
    files: tuple[FileEntry, ...] = ()
    metrics: Metrics
    data_positions: dict[str, object] = {}
    run_id: str
    validation: Validation | None = None
    format_version: int = MANIFEST_FORMAT

    def __post_init__(self) -> None:
        check_checkpoint_name(self.name)

    @property
    def nbytes(self) -> int:
        """Bytes of all files together."""
        return sum(file.size for file in self.files)

    @property
    def status(self) -> ReportedCheckpointStatus:
        """How far the checkpoint is."""
        if self.validation is None:
            return ReportedCheckpointStatus.COMMITTED
        return self.validation.status

    def with_files(self, files: Iterable[FileEntry]) -> Manifest:
        """Give the manifest with these files, less the user's metadata file, which may change."""
        kept = (file for file in files if file.path != METADATA_FILE)
        ordered = sorted(kept, key=lambda file: file.path)
        return msgspec.structs.replace(self, files=tuple(ordered))

    def with_stored_sizes(self, directory: Path) -> Manifest:
        """Give the manifest the files' sizes as they are: a log may have grown since `report`."""
        sizes = {file.path: os.stat(directory / file.path).st_size for file in self.files}
        files = tuple(FileEntry(path, size) for path, size in sizes.items())
        return msgspec.structs.replace(self, files=files)

    def with_validation(self, validation: Validation) -> Manifest:
        """Give the manifest with what came of the validation."""
        metrics = {**self.metrics, **validation.metrics}
        return msgspec.structs.replace(self, metrics=metrics, validation=validation)

    def encode(self) -> bytes:
        """Give the manifest as JSON."""
        plain = encode_non_finite(msgspec.to_builtins(self))
        return msgspec.json.format(msgspec.json.encode(plain), indent=1)

    @staticmethod
    def decode(data: bytes, place: object = "the manifest") -> Manifest:
        """Read a manifest that is stored at `place`.

        Raises:
            UnsupportedFormatError: A newer version of Drawbar has written it.
            msgspec.MsgspecError, CheckpointError: It is damaged.
        """
        plain = decode_non_finite(msgspec.json.decode(data))
        version = plain.get("format_version") if isinstance(plain, dict) else None
        if isinstance(version, int) and version > MANIFEST_FORMAT:
            raise UnsupportedFormatError.of(place, version, MANIFEST_FORMAT)
        return msgspec.convert(plain, Manifest)


def assign_directory_names(found: Mapping[str, Manifest]) -> list[Manifest]:
    """Give the manifests of a run's folders, oldest first, each named as its folder is.

    What the user has copied beside a checkpoint is left out: it would count twice.
    """
    there = {(each.index, each.time) for name, each in found.items() if name == each.name}
    named = [
        msgspec.structs.replace(each, name=name)
        for name, each in found.items()
        if name == each.name or (each.index, each.time) not in there
    ]
    return sorted(named, key=lambda manifest: (manifest.index, manifest.time))


def read_file_or_none(place: Path | RemotePath, name: str, start: int = 0) -> bytes | None:
    """Read a file of a run or checkpoint, from a byte on; None if it is not there.

    Raises:
        OSError: It cannot be read, or is no file; see `read_regular_file`.
    """
    if isinstance(place, RemotePath):
        data = place.read_or_none(name)
        return None if data is None else data[start:]
    try:
        return read_regular_file(place / name, start)
    except (FileNotFoundError, NotADirectoryError):
        return None


def read_checksums(place: Path | RemotePath) -> dict[str, str] | None:
    """Read the checksums of a checkpoint; None if they were not written yet.

    They follow the commit without an fsync, so that a power cut may leave an empty file.
    """
    data = read_file_or_none(place, CHECKSUMS_FILE)
    if data is None or not data.strip(b"\0"):
        return None
    try:
        sums = msgspec.json.decode(data, type=dict[str, str])
        return {check_relative_path(path): value for path, value in sums.items()}
    except DECODE_ERRORS as error:
        raise CheckpointError(f"{place}/{CHECKSUMS_FILE} cannot be read: {error}") from error


def compute_checksum(path: Path) -> str:
    """Give the xxh3 (64 bit) of a file's content as 16 hex digits."""
    import xxhash

    digest = xxhash.xxh3_64()
    with open(path, "rb") as file:
        while chunk := file.read(4 * 1024 * 1024):
            digest.update(chunk)
    return str(digest.hexdigest())


def list_user_files(place: RemotePath) -> tuple[FileEntry, ...]:
    """List what the user saved, as `files.list_files` does for a local directory."""
    return tuple(file for file in place.list_files() if not is_reserved(file.path))


def read_manifest(place: Path | RemotePath) -> Manifest | None:
    """Read the manifest of a checkpoint directory; None if there is none that can be read.

    It says what came of the checkpoint's validation, if that has ended.
    """
    manifest = _decode_manifest_file(place, MANIFEST_FILE)
    # Most have none: on an object store each further file is a request.
    if manifest is None or manifest.validation is None:
        return manifest
    validated = _decode_manifest_file(place, VALIDATION_FILE)
    if validated is None or validated.time != manifest.time:  # not that of an earlier commit here
        return manifest
    return validated


def write_manifest(directory: Path, manifest: Manifest, *, durable: bool) -> None:
    """Write the manifest into a local directory, with which it is a checkpoint."""
    path = directory / MANIFEST_FILE
    # The files first: a manifest that outlives a power cut must not promise what has not.
    if durable:
        fsync_tree(directory)
    write_atomically(path, manifest.encode(), durable=durable)
    if durable:
        fsync_path(directory)


def _decode_manifest_file(place: Path | RemotePath, name: str) -> Manifest | None:
    try:
        data = read_file_or_none(place, name)
        return None if data is None else Manifest.decode(data, f"{place}/{name}")
    except DECODE_ERRORS:
        return None
    except OSError as error:
        if error.errno not in NOT_A_FILE_ERRNOS:  # the storage may answer the next time
            raise
        return None


def check_file_sizes(place: Path | RemotePath, manifest: Manifest) -> None:
    """Check that each file of the manifest is there with its size.

    Raises:
        CheckpointError: A file is missing, is none any more, or has another size.
    """
    if isinstance(place, RemotePath):
        sizes: dict[str, int | None] = {file.path: file.size for file in place.list_files()}
    else:
        sizes = {file.path: _get_size(place / file.path) for file in manifest.files}
    for file in manifest.files:
        size = sizes.get(file.path)
        if size is None:
            raise CheckpointError(f"{place}/{file.path} is missing")
        if size != file.size:
            raise CheckpointError(
                f"{place}/{file.path} has {size} bytes, the commit has {file.size}"
            )


def _get_size(path: Path) -> int | None:
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return None
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is no file any more")
    return found.st_size


def make_already_committed_error(place: Path | RemotePath) -> FileExistsError:
    """Say that a name is taken."""
    return FileExistsError(
        f"{place} is a committed checkpoint already; give each checkpoint its own "
        "checkpoint_dir_name"
    )
