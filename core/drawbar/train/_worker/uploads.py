"""Offer and persist the checkpoint files of a rank.

`Uploads` is the worker side of the commit protocol: it offers files, persists the files that the
controller assigns to this rank, and waits for the commit. The upload target determines where files
are persisted.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

from drawbar._process.errors import StorageError
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.checkpoint_checks import (
    can_move,
    check_directory,
    check_files,
    check_remote_directory,
)
from drawbar._storage.checkpoint_store import UploadTarget, make_default_name
from drawbar._storage.contents import FileEntry, is_external, list_files, scan_directory
from drawbar._storage.files import FileIdentities, copy_files, remove_tree
from drawbar._storage.remote_path import RemotePath, upload_files
from drawbar._storage.retries import is_transient, warn_if_slow
from drawbar._storage.run_directory import RunDirectory
from drawbar._storage.staging import AssignedFiles, make_shared_name
from drawbar.train._config.checkpoint_modes import CheckpointUploadMode
from drawbar.train._protocol.commands import CommitCompleted, PersistFiles
from drawbar.train._protocol.messages import (
    CheckpointOffer,
    FilesPersisted,
    InPlaceOffer,
    StagedOffer,
    UploadFnOffer,
)
from drawbar.train._worker.async_commits import AsyncCommits
from drawbar.train._worker.command_queue import CommandQueue
from drawbar.train._worker.report_checks import BackgroundWrite, CheckpointUploadFn, UploadOptions


@contextmanager
def _raise_storage_errors() -> Iterator[None]:
    """Convert permanent storage errors to StorageError.

    Transient errors and missing files are raised unchanged.
    """
    try:
        yield
    except OSError as error:
        if is_transient(error) or isinstance(error, FileNotFoundError):
            raise
        raise StorageError(*error.args) from (error.__cause__ or error)


class Uploads:
    """Checkpoints that one rank has offered and that are not committed yet.

    Args:
        directory: Run directory.
        target: Storage that receives the rank's assigned files.
        label: Name of the rank in the staging area.
        attempt: Number of the attempt.
        command_queue: Sends messages to the controller and receives its commands.

    Attributes:
        async_commits: Commits that the training function does not wait for.
    """

    def __init__(
        self,
        directory: RunDirectory,
        target: UploadTarget,
        label: str,
        attempt: int,
        command_queue: CommandQueue,
    ) -> None:
        self._directory = directory
        self._checkpoints = directory.checkpoints
        self._staging = directory.staging
        self._target = target
        self._label = label
        self._attempt = attempt
        self._command_queue = command_queue
        # All by checkpoint name.
        self._upload_fns: dict[str, tuple[CheckpointUploadFn, Checkpoint]] = {}
        self._file_identities: dict[str, FileIdentities] = {}
        self._background_writes: dict[str, BackgroundWrite] = {}
        self.async_commits = AsyncCommits(self.complete_commit, command_queue.send)

    # -- offers

    def make_offer(
        self, checkpoint: Checkpoint, options: UploadOptions, report_index: int
    ) -> CheckpointOffer:
        """List the files of a checkpoint; in mode ASYNC, stage them.

        Raises:
            FileNotFoundError: The checkpoint is not a directory on this node.
            ValueError: The mode does not support the location of the checkpoint.
        """
        name = make_default_name(report_index) if options.name is None else options.name
        if options.background is not None:
            self._background_writes[name] = options.background
            options.background.report_index.set_result(report_index)
            # Not a StagedOffer: the files are staged when they are written.
            return CheckpointOffer(
                directory=checkpoint.path, files=options.background.files, checkpoint_name=name
            )
        should_move = self._should_move(checkpoint, options)
        if options.mode is CheckpointUploadMode.NO_UPLOAD:
            if should_move:
                raise ValueError(
                    "report() with NO_UPLOAD commits the directory in place, but "
                    "delete_local_checkpoint_after_upload=True would delete the checkpoint. "
                    "Remove one of the two arguments."
                )
            return self._offer_in_place(checkpoint, "report() with NO_UPLOAD")
        if options.upload_fn is not None:
            return self._record_identities(
                self._offer_for_upload_fn(checkpoint, name, options.upload_fn, should_move)
            )
        if not checkpoint.is_local and self._checkpoints.get_child_name(checkpoint) is None:
            checkpoint = self._download(checkpoint)
        try:
            return self._record_identities(
                self._offer_files(checkpoint, name, options.mode, should_move)
            )
        except FileNotFoundError:
            # Another rank of this node may just have moved the same directory. Its source path and
            # the checkpoint name are the only information left to find it in the staging area.
            source = Path(checkpoint.path)
            stage = self._staging.find_moved(source, name, attempt=self._attempt)
            if stage is None:
                raise
            return self._offer_staged(stage, name)

    def _should_move(self, checkpoint: Checkpoint, options: UploadOptions) -> bool:
        if options.delete_local is not None:
            return options.delete_local
        should_move = options.mode.default_delete_local_checkpoint_after_upload()
        return should_move and self._checkpoints.get_child_name(checkpoint) is None

    def _record_identities(self, offer: CheckpointOffer) -> CheckpointOffer:
        """Record which files to delete after the commit, so that newer files are not deleted."""
        if offer.should_move and not self._is_in_staging(offer):
            self._file_identities[offer.checkpoint_name] = FileIdentities.capture(
                Path(offer.directory), offer.files
            )
        return offer

    def _download(self, checkpoint: Checkpoint) -> Checkpoint:
        """Copy a checkpoint to the staging area."""
        stage = self._staging.make_directory(self._label)
        try:
            checkpoint.to_directory(stage)
        except BaseException:
            remove_tree(stage)
            raise
        return Checkpoint(stage)

    def _offer_for_upload_fn(
        self, checkpoint: Checkpoint, name: str, upload_fn: CheckpointUploadFn, should_move: bool
    ) -> CheckpointOffer:
        child_name = self._checkpoints.get_child_name(checkpoint)
        self._upload_fns[child_name or name] = upload_fn, checkpoint
        if child_name is not None or not checkpoint.is_local or not Path(checkpoint.path).is_dir():
            # The files are only known after the upload function has returned.
            return UploadFnOffer(
                directory=checkpoint.path, files=(), checkpoint_name=child_name or name
            )
        offer = self._offer_local(checkpoint, name, should_move=should_move)
        return UploadFnOffer(**msgspec.structs.asdict(offer))

    def _offer_files(
        self, checkpoint: Checkpoint, name: str, mode: CheckpointUploadMode, should_move: bool
    ) -> CheckpointOffer:
        offer = self._offer_local(checkpoint, name, should_move=should_move)
        if should_move and self._checkpoints.get_child_name(checkpoint) is not None:
            raise ValueError(
                f"report() cannot move {checkpoint!r}, because it is already in the run directory. "
                "Set delete_local_checkpoint_after_upload=False to copy it."
            )
        if mode is CheckpointUploadMode.SYNC or self._is_in_staging(offer):
            return offer
        return self._copy_to_staging(offer, name)

    def _offer_in_place(self, checkpoint: Checkpoint, source: str) -> CheckpointOffer:
        """Offer a directory that is committed in place. `source` begins the error messages."""
        name = self._checkpoints.get_in_place_name(checkpoint)
        if name is None or self._staging.has_directory(Path(checkpoint.path)):
            raise ValueError(
                f"{source}: {checkpoint!r} cannot be committed in place. Use a directory that you "
                f"create in {self._directory.uri}, not with checkpoint_dir(), or a path or URI "
                "outside the run directory."
            )
        path = self._checkpoints.path(name)
        if isinstance(path, RemotePath):
            check_remote_directory(path)
            files = path.list_user_files()
        else:
            files = self._offer_local(checkpoint, name, should_move=False).files
            if path.is_symlink():
                raise ValueError(
                    f"{source}: {path} is a symbolic link to {os.path.realpath(path)}. "
                    "Report that directory with another mode, which copies it."
                )
        if not files:
            raise FileNotFoundError(f"{source}: {path} contains no files.")
        return InPlaceOffer(directory=checkpoint.path, files=files, checkpoint_name=name)

    def _offer_local(
        self, checkpoint: Checkpoint, name: str, *, should_move: bool
    ) -> CheckpointOffer:
        directory = Path(checkpoint.path)
        if not checkpoint.is_local or not directory.is_dir():
            raise FileNotFoundError(
                f"report() received {checkpoint!r}, which is not a directory on this worker's "
                f"node ({os.uname().nodename}). If checkpoint_dir() created it, report it only "
                "once, because report() moves it. If the files are already in the run's storage, "
                "use CheckpointUploadMode.NO_UPLOAD."
            )
        in_staging = self._staging.has_directory(directory)
        if not in_staging:
            check_directory(directory, self._directory)
        contents = (
            self._staging.scan_directory(directory) if in_staging else scan_directory(directory)
        )
        check_files(directory, contents, self._directory)
        # A checkpoint must be self-contained: the target of a link may be deleted before it is
        # loaded.
        if in_staging and contents.symlinks:
            with _raise_storage_errors():
                self._staging.replace_symlinks(directory)
        should_move = should_move and not in_staging
        return self._offer_directory(
            directory,
            contents.files,
            name,
            should_move=should_move and can_move(directory, contents.files, self._directory),
        )

    def _copy_to_staging(self, offer: CheckpointOffer, name: str) -> CheckpointOffer:
        assigned_files = self._make_assigned_files(offer, offer.files, name)
        with _raise_storage_errors():
            if offer.should_move:
                stage = self._staging.stage_moved(assigned_files, attempt=self._attempt)
                return self._offer_staged(stage, name)
            stage = self._staging.stage_files(assigned_files)
        return self._offer_directory(stage, offer.files, name, should_move=False)

    def _offer_staged(self, stage: Path, name: str) -> CheckpointOffer:
        """Offer files that were moved to the staging area."""
        return self._offer_directory(stage, list_files(stage), name, should_move=True)

    def _offer_directory(
        self, directory: Path, files: tuple[FileEntry, ...], name: str, *, should_move: bool
    ) -> CheckpointOffer:
        kind = StagedOffer if self._target.is_staged(directory) else CheckpointOffer
        return kind(
            directory=str(directory), files=files, checkpoint_name=name, should_move=should_move
        )

    def _make_assigned_files(
        self, offer: CheckpointOffer, files: Sequence[FileEntry], name: str
    ) -> AssignedFiles:
        return AssignedFiles(
            Path(offer.directory), files, self._label, name, should_move=offer.should_move
        )

    # -- commits

    def complete_commit(self, report_index: int, offer: CheckpointOffer) -> None:
        """Persist this rank's assigned files of a report, if there are any; wait for the commit."""
        # Either command may arrive first: a rank has nothing to persist if all its files are
        # staged, or are also offered by a lower rank.
        command = self._command_queue.wait(
            (PersistFiles, report_index), (CommitCompleted, report_index)
        )
        if isinstance(command, PersistFiles):
            with self.async_commits.storing(command.files):
                self._command_queue.send(self._persist(report_index, offer, command))
            self._command_queue.wait((CommitCompleted, report_index))
        # Only after the commit: until then there may be no other copy of these files.
        if self._is_in_staging(offer):
            remove_tree(Path(offer.directory))
        elif offer.should_move:
            has_persisted = isinstance(command, PersistFiles) and bool(command.files)
            self._staging.release_source(
                self._file_identities.pop(offer.checkpoint_name), given=has_persisted
            )

    def _is_in_staging(self, offer: CheckpointOffer) -> bool:
        return self._staging.has_directory(Path(offer.directory))

    def _persist(
        self, report_index: int, offer: CheckpointOffer, command: PersistFiles
    ) -> FilesPersisted:
        upload = self._upload_fns.pop(command.checkpoint_name, None)
        if upload is not None:
            lower_ranks = {file.path for file in offer.files} - {
                file.path for file in command.files
            }
            name = self._run_upload_fn(command.checkpoint_name, *upload, lower_ranks)
            return FilesPersisted(
                report_index=report_index, staging_directory="", checkpoint_name=name
            )
        write = self._background_writes.pop(command.checkpoint_name, None)
        if write is not None:
            write.done.result()
            if self._target.is_staged(Path(offer.directory)):
                return FilesPersisted(report_index=report_index, staging_directory=offer.directory)
        assigned = self._make_assigned_files(offer, command.files, command.checkpoint_name)
        if not offer.should_move:
            # The assigned files of the ranks are disjoint, so all ranks can add theirs to one
            # directory, which the commit renames. Moved files stay separate, so that they are found
            # if there is no commit.
            shared = make_shared_name(self._attempt, report_index)
            assigned = dataclasses.replace(assigned, shared_directory=shared)
        with _raise_storage_errors():
            staged = self._target.persist(assigned)
        directory = "" if staged.directory is None else str(staged.directory)
        return FilesPersisted(
            report_index=report_index, staging_directory=directory, checksums=staged.checksums
        )

    def _run_upload_fn(
        self,
        name: str,
        upload_fn: CheckpointUploadFn,
        checkpoint: Checkpoint,
        files_of_lower_ranks: set[str],
    ) -> str:
        """Call the user's upload function and return the name of the uploaded checkpoint."""
        with warn_if_slow(f"checkpoint_upload_fn for checkpoint {name} of {self._label}"):
            uploaded = upload_fn(checkpoint, name)
        if not isinstance(uploaded, Checkpoint):
            raise TypeError(f"checkpoint_upload_fn must return a Checkpoint, found {uploaded!r}.")
        uploaded_name = self._checkpoints.get_in_place_name(uploaded)
        is_outside_run = uploaded_name is None or is_external(uploaded_name)
        if uploaded == checkpoint and checkpoint.is_local and is_outside_run:
            # Copy now: the directory may be deleted soon, for example at the end of a `with` block.
            self._copy_missing_files(Path(checkpoint.path), name, files_of_lower_ranks)
            return name
        if uploaded_name == name:
            return name
        return self._offer_in_place(uploaded, "checkpoint_upload_fn").checkpoint_name or name

    def _copy_missing_files(self, source: Path, name: str, files_of_lower_ranks: set[str]) -> None:
        """Copy files that lower ranks do not provide to the directory of the checkpoint."""
        path = self._checkpoints.path(name)
        files = [file for file in list_files(source) if file.path not in files_of_lower_ranks]
        if isinstance(path, RemotePath):
            upload_files(source, path, files)
        else:
            path.mkdir(parents=True, exist_ok=True)
            copy_files(source, path, files)
