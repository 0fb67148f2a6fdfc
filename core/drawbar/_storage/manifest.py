"""Read, write, and check the manifest of a checkpoint."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path

import msgspec

from drawbar._base.metrics import Metrics, decode_non_finite, encode_non_finite
from drawbar._process.errors import CheckpointError, UnsupportedFormatError
from drawbar._storage.contents import (
    CHECKSUMS_FILE,
    MANIFEST_FILE,
    METADATA_FILE,
    VALIDATION_FILE,
    FileEntry,
    check_checkpoint_name,
    check_relative_path,
)
from drawbar._storage.files import NOT_A_FILE_ERRNOS, fsync_path, fsync_tree, write_atomically
from drawbar._storage.storage_path import StoragePath


class ReportedCheckpointStatus(Enum):
    """Status of a reported checkpoint.

    Attributes:
        COMMITTED: Saved; no validation was requested. Checkpoints in all other states are saved
            too.
        PENDING_VALIDATION: The validation has not ended.
        VALIDATED: The metrics include the validation metrics.
        VALIDATION_TIMEOUT: The validation took longer than its `timeout_s`.
        VALIDATION_FAILED: The validation raised an error, or its process died.

    Example:
        >>> reported.status is train.ReportedCheckpointStatus.VALIDATED
        True
    """

    COMMITTED = "COMMITTED"
    PENDING_VALIDATION = "PENDING_VALIDATION"
    VALIDATED = "VALIDATED"
    VALIDATION_TIMEOUT = "VALIDATION_TIMEOUT"
    VALIDATION_FAILED = "VALIDATION_FAILED"


class Validation(msgspec.Struct, frozen=True, kw_only=True):
    """Arguments and result of the validation of a checkpoint.

    Attributes:
        fn_kwargs: Arguments of the validation function.
        timeout_s: Maximum duration in seconds; None for no limit.
        status: Status of the checkpoint after the validation.
        metrics: Metrics that the function returned.
        error: Reason for missing metrics; "" if there is none.
        seconds: Duration in seconds, including the time it waited for resources.
    """

    fn_kwargs: dict[str, object] = {}
    timeout_s: float | None = None
    status: ReportedCheckpointStatus = ReportedCheckpointStatus.PENDING_VALIDATION
    metrics: Metrics = {}
    error: str = ""
    seconds: float = 0.0

    def with_success(self, metrics: Metrics) -> Validation:
        """Return a copy with the metrics of a successful validation."""
        status = ReportedCheckpointStatus.VALIDATED
        return msgspec.structs.replace(self, status=status, metrics=metrics)

    def with_failure(self, error: str) -> Validation:
        """Return a copy with the error of a failed validation."""
        status = ReportedCheckpointStatus.VALIDATION_FAILED
        return msgspec.structs.replace(self, status=status, error=error)

    def with_timeout(self) -> Validation:
        """Return a copy for a validation that exceeded its timeout."""
        return msgspec.structs.replace(
            self,
            status=ReportedCheckpointStatus.VALIDATION_TIMEOUT,
            error=f"it took longer than timeout_s={self.timeout_s:g}",
        )


MANIFEST_FORMAT = 1
"""Format version of manifests. New optional fields do not change it."""

BEST_CHECKPOINT_SOURCE = "best checkpoint"
"""Name of the data positions that identify the best checkpoints of a framework."""

DECODE_ERRORS = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, CheckpointError)
"""Errors that decoding raises for damaged or invalid data."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Content and metrics of a committed checkpoint.

    A checkpoint is committed by writing its manifest; a directory without one is not a checkpoint.

    Attributes:
        name: Name of the directory in the run, or address of an external checkpoint.
        index: Number of the report that saved the checkpoint.
        attempt: Number of the attempt that reported it.
        world_size: Number of ranks of that attempt.
        time: Time of the commit, in seconds since the epoch.
        files: Files that the user saved.
        metrics: Reported metrics, including metrics of a finished validation.
        data_positions: Positions in the datasets.
        run_id: Identifier of the run.
        validation: Validation of the checkpoint; None if none was requested.
        format_version: Format version of the manifest.

    Example:
        Print how large a checkpoint is and how many workers saved it:

            manifest = result.checkpoint.manifest
            print(manifest.nbytes, manifest.world_size)
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
        """Total size of the files in bytes."""
        return sum(file.size for file in self.files)

    @property
    def status(self) -> ReportedCheckpointStatus:
        """Status of the checkpoint and its validation."""
        if self.validation is None:
            return ReportedCheckpointStatus.COMMITTED
        return self.validation.status

    def with_files(self, files: Iterable[FileEntry]) -> Manifest:
        """Return a copy with these files, except the metadata file, which can change.

        Args:
            files: Files of the checkpoint.

        Returns:
            The copy, with files sorted by path.
        """
        user_files = (file for file in files if file.path != METADATA_FILE)
        sorted_files = sorted(user_files, key=lambda file: file.path)
        return msgspec.structs.replace(self, files=tuple(sorted_files))

    def with_stored_sizes(self, directory: Path) -> Manifest:
        """Return a copy with the current file sizes.

        A file can change after `report()`, for example a log to which the program still writes.

        Args:
            directory: Local directory with the files.

        Returns:
            The copy.

        Raises:
            OSError: A file does not exist.
        """
        sizes = {file.path: os.stat(directory / file.path).st_size for file in self.files}
        files = tuple(FileEntry(path, size) for path, size in sizes.items())
        return msgspec.structs.replace(self, files=files)

    def with_validation(self, validation: Validation) -> Manifest:
        """Return a copy with the result of the validation and its metrics.

        Args:
            validation: Finished validation.

        Returns:
            The copy.
        """
        metrics = {**self.metrics, **validation.metrics}
        return msgspec.structs.replace(self, metrics=metrics, validation=validation)

    def encode(self) -> bytes:
        """Return the manifest as JSON."""
        plain = encode_non_finite(msgspec.to_builtins(self))
        return msgspec.json.format(msgspec.json.encode(plain), indent=1)

    @staticmethod
    def decode(data: bytes, path: object = "the manifest") -> Manifest:
        """Decode a manifest.

        Args:
            data: Manifest as JSON.
            path: File of the manifest, for error messages.

        Returns:
            The manifest.

        Raises:
            UnsupportedFormatError: A newer version of Drawbar wrote it.
            msgspec.MsgspecError, CheckpointError: It is damaged.
        """
        plain = decode_non_finite(msgspec.json.decode(data))
        version = plain.get("format_version") if isinstance(plain, dict) else None
        if isinstance(version, int) and version > MANIFEST_FORMAT:
            raise UnsupportedFormatError.of(path, version, MANIFEST_FORMAT)
        return msgspec.convert(plain, Manifest)


# Now and not in two threads at once, because msgspec can crash if two threads use a type for the
# first time. `convert` uses what this prepares.
msgspec.json.Decoder(Manifest)


def assign_directory_names(manifests: Mapping[str, Manifest]) -> list[Manifest]:
    """Return the manifests, oldest first, each with the name of its directory.

    The name in a manifest differs if the user has renamed or copied the directory. A copy is
    omitted if the original exists.

    Args:
        manifests: Manifest in each directory, by the name of the directory.
    """
    originals = {
        (manifest.index, manifest.time)
        for name, manifest in manifests.items()
        if name == manifest.name
    }
    renamed = [
        msgspec.structs.replace(manifest, name=name)
        for name, manifest in manifests.items()
        if name == manifest.name or (manifest.index, manifest.time) not in originals
    ]
    return sorted(renamed, key=lambda manifest: (manifest.index, manifest.time))


def read_checksums(path: StoragePath) -> dict[str, str] | None:
    """Read the checksums of a checkpoint; return None if they have not been written.

    They are written after the commit without fsync, so a power loss may leave an empty file.

    Raises:
        CheckpointError: The file is damaged.
    """
    data = path.read_or_none(CHECKSUMS_FILE)
    if data is None or not data.strip(b"\0"):
        return None
    try:
        sums = msgspec.json.decode(data, type=dict[str, str])
        return {check_relative_path(path): value for path, value in sums.items()}
    except DECODE_ERRORS as error:
        raise CheckpointError(f"{path}/{CHECKSUMS_FILE} cannot be read: {error}") from error


def compute_checksum(path: Path) -> str:
    """Return the xxh3 (64 bit) of a file as 16 hex digits."""
    import xxhash

    with open(path, "rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_64).hexdigest()


def read_manifest(path: StoragePath) -> Manifest | None:
    """Read the manifest of a checkpoint directory; return None if there is no readable one.

    The manifest includes the result of a finished validation.
    """
    manifest = _decode_manifest_file(path, MANIFEST_FILE)
    # Skip this for most checkpoints: on an object store each read is a request.
    if manifest is None or manifest.validation is None:
        return manifest
    validated = _decode_manifest_file(path, VALIDATION_FILE)
    # A result with another time belongs to an earlier commit in this directory.
    if validated is None or validated.time != manifest.time:
        return manifest
    return validated


def write_manifest(directory: Path, manifest: Manifest, *, durable: bool) -> None:
    """Write the manifest into a local directory, which makes it a checkpoint."""
    path = directory / MANIFEST_FILE
    # Files first: after a power loss, no manifest may exist without its files.
    if durable:
        fsync_tree(directory)
    write_atomically(path, manifest.encode(), durable=durable)
    if durable:
        fsync_path(directory)


def _decode_manifest_file(path: StoragePath, name: str) -> Manifest | None:
    try:
        data = path.read_or_none(name)
        return None if data is None else Manifest.decode(data, f"{path}/{name}")
    except DECODE_ERRORS:
        return None
    except OSError as error:
        if error.errno not in NOT_A_FILE_ERRNOS:  # a storage error can be temporary
            raise
        return None


def check_file_sizes(path: StoragePath, manifest: Manifest) -> None:
    """Check that each file of the manifest exists with its size.

    Raises:
        CheckpointError: A file is missing, is not a regular file, or has another size.
    """
    sizes = path.get_sizes(manifest.files)
    for file in manifest.files:
        size = sizes.get(file.path)
        if size is None:
            raise CheckpointError(f"{path}/{file.path} is missing.")
        if size != file.size:
            raise CheckpointError(
                f"{path}/{file.path} has {size} bytes, but had {file.size} bytes at the commit."
            )


def make_already_committed_error(path: StoragePath) -> FileExistsError:
    """Return the error for a name that a committed checkpoint has."""
    return FileExistsError(
        f"Checkpoint {path} is already committed. Use a different checkpoint_dir_name for each "
        "checkpoint."
    )
