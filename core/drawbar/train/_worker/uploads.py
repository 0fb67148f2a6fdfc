"""How a checkpoint gets from a worker into the run's storage, while the function waits or goes on.

`Uploads` is the worker's half of the commit protocol: it offers files, persists them when the
controller says which, and waits for the commit. What persisting means is the run directory's
matter.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Protocol

import msgspec

from drawbar.train._errors import StorageError
from drawbar.train._messages import Message, Offer, Persisted
from drawbar.train._orders import Committed, Order, Persist
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.checkpoint_store import UploadTarget
from drawbar.train._storage.contents import FileEntry, is_external, list_files, scan_directory
from drawbar.train._storage.files import FileIdentities, copy_files, remove_tree
from drawbar.train._storage.filesystem import RemotePath
from drawbar.train._storage.manifest import list_user_files
from drawbar.train._storage.retries import is_transient, warn_if_slow
from drawbar.train._storage.run_directory import RunDirectory
from drawbar.train._storage.staging import AssignedFiles
from drawbar.train._worker.async_commits import AsyncCommits
from drawbar.train._worker.report_checks import (
    ReservedPaths,
    can_move,
    check_directory,
    check_files,
    check_remote_directory,
)

CheckpointUploadFn = Callable[[Checkpoint, str], Checkpoint]
"""Puts a checkpoint into the run's storage under a name, or elsewhere; gives it as it lies there.

One that is given back as it was, from a local directory outside the run, is copied by the run.
"""


class CheckpointUploadMode(Enum):
    """Whether `report()` waits for the commit.

    SYNC: it returns when the checkpoint is committed. ASYNC: it returns as soon as the files may be
    overwritten, and the commit follows; at most two are in flight, then `report()` waits for the
    oldest. The end of the training function waits for all of them. NO_UPLOAD: the directory is
    committed where it lies, in the run's directory or anywhere else that the driver can read. One
    that lies outside the run's directory is never deleted.
    """

    SYNC = "sync"
    ASYNC = "async"
    NO_UPLOAD = "no_upload"

    def default_delete_local_checkpoint_after_upload(self) -> bool:
        """Whether `report()` takes over the local directory if the caller does not say."""
        return self is CheckpointUploadMode.ASYNC


def check_upload_mode(mode: object) -> None:
    """Check how `report()` was told to keep a checkpoint.

    Raises:
        TypeError: `mode` is not a `CheckpointUploadMode`.
    """
    if not isinstance(mode, CheckpointUploadMode):
        raise TypeError(
            f"checkpoint_upload_mode must be a CheckpointUploadMode, found {mode!r}; "
            "write CheckpointUploadMode.ASYNC"
        )


@contextmanager
def _raise_storage_errors() -> Iterator[None]:
    """Tell a refusal of the storage from what may pass, and from files that are not there."""
    try:
        yield
    except OSError as error:
        if is_transient(error) or isinstance(error, FileNotFoundError):
            raise
        raise StorageError(*error.args) from (error.__cause__ or error)


class WaitForCommand(Protocol):
    """Waits for one of several orders."""

    def __call__(self, *keys: tuple[type[Order], int]) -> Order:
        """Give the first of these orders that is there."""
        ...


class Uploads:
    """The checkpoints that one rank has offered and that are not committed yet.

    Args:
        directory: Of the run.
        sink: Takes this rank's shares.
        label: Names the rank in the staging area.
        attempt: Number of the attempt.
        say: Tells the controller something.
        wait: Waits for an order.

    Attributes:
        in_flight: Those that the function does not wait for.
    """

    def __init__(
        self,
        directory: RunDirectory,
        target: UploadTarget,
        label: str,
        attempt: int,
        say: Callable[[Message], None],
        wait: WaitForCommand,
    ) -> None:
        self._directory = directory
        self._checkpoints = directory.checkpoints
        self._staging = directory.staging
        self._sink = target
        self._label = label
        self._attempt = attempt
        self._say = say
        self._wait = wait
        self._upload_fns: dict[str, tuple[CheckpointUploadFn, Checkpoint]] = {}
        self._file_identities: dict[
            str, FileIdentities
        ] = {}  # by the name of the checkpoint that they are for
        self.async_commits = AsyncCommits(self.persist_and_wait, say)

    @cached_property
    def _reserved_directories(self) -> ReservedPaths:
        return ReservedPaths.from_run_directory(self._directory)

    # -- offering

    def make_offer(
        self,
        checkpoint: Checkpoint,
        *,
        name: str,
        mode: CheckpointUploadMode,
        upload_fn: CheckpointUploadFn | None,
        should_move: bool,
    ) -> Offer:
        """Take stock of a checkpoint's files; an asynchronous one is put out of reach.

        Raises:
            FileNotFoundError: It is not a directory here.
            ValueError: It does not lie where its mode wants it.
        """
        if mode is CheckpointUploadMode.NO_UPLOAD:
            if should_move:
                raise ValueError(
                    "report() with NO_UPLOAD commits the directory where it lies; "
                    "delete_local_checkpoint_after_upload=True would delete the checkpoint"
                )
            return self._offer_in_place(checkpoint, "report() with NO_UPLOAD")
        if upload_fn is not None:
            return self._record_identities(
                self._offer_for_upload_fn(checkpoint, name, upload_fn, should_move)
            )
        if not checkpoint.is_local and self._checkpoints.get_child_name(checkpoint) is None:
            checkpoint = self._download(checkpoint)
        try:
            return self._record_identities(self._offer_files(checkpoint, name, mode, should_move))
        # Another rank of this node may have handed over the same folder a moment ago.
        except FileNotFoundError:
            # By the folder and the name: it is gone from where it lay, so nothing else of it is
            # known.
            source = Path(checkpoint.path)
            taken = self._staging.find_moved(source, name, attempt=self._attempt)
            if taken is None:
                raise
            return self._offer_staged(taken, name)

    def _record_identities(self, offer: Offer) -> Offer:
        """Remember the files that are to be deleted once they are committed, and no others."""
        if offer.handed_over and not self._is_in_staging(offer):
            self._file_identities[offer.name] = FileIdentities.capture(
                Path(offer.directory), offer.files
            )
        return offer

    def _download(self, checkpoint: Checkpoint) -> Checkpoint:
        """Copy a checkpoint from wherever it lies to where a commit can take it."""
        stage = self._staging.make_directory(self._label)
        try:
            checkpoint.to_directory(stage)
        except BaseException:
            remove_tree(stage)
            raise
        return Checkpoint(stage)

    def _offer_for_upload_fn(
        self, checkpoint: Checkpoint, name: str, upload_fn: CheckpointUploadFn, should_move: bool
    ) -> Offer:
        own = self._checkpoints.get_child_name(checkpoint)
        self._upload_fns[own or name] = upload_fn, checkpoint
        if own is not None or not checkpoint.is_local or not Path(checkpoint.path).is_dir():
            # What will lie there is known when the function has returned.
            place, given = checkpoint.path, own or name
            return Offer(directory=place, files=(), staged=False, name=given, in_place=True)
        offer = self._offer_local(checkpoint, name, should_move=should_move)
        return msgspec.structs.replace(offer, staged=False, in_place=True)

    def _offer_files(
        self, checkpoint: Checkpoint, name: str, mode: CheckpointUploadMode, should_move: bool
    ) -> Offer:
        offer = self._offer_local(checkpoint, name, should_move=should_move)
        if should_move and self._checkpoints.get_child_name(checkpoint) is not None:
            raise ValueError(
                f"report() was given {checkpoint!r}, which lies in the run already, to be moved or "
                "deleted; set delete_local_checkpoint_after_upload=False to have it copied"
            )
        if mode is CheckpointUploadMode.SYNC or self._is_in_staging(offer):
            return offer
        return self._copy_to_staging(offer, name)

    def _offer_in_place(self, checkpoint: Checkpoint, source: str) -> Offer:
        """Take stock of what lies where it is to stay; `who` says so."""
        name = self._checkpoints.get_in_place_name(checkpoint)
        if name is None or self._staging.has_directory(Path(checkpoint.path)):
            raise ValueError(
                f"{source}: {checkpoint!r} is no place where a checkpoint can stay. That is a "
                "folder "
                f"of its own in {self._directory.uri}, or elsewhere one that a path or a URI "
                "leads to"
            )
        place = self._checkpoints.path(name)
        if isinstance(place, RemotePath):
            check_remote_directory(place)
            files = list_user_files(place)
        else:
            files = self._offer_local(checkpoint, name, should_move=False).files
            if place.is_symlink():
                raise ValueError(
                    f"{source}: {place} is a symbolic link to "
                    f"{os.path.realpath(place)}; report that directory with another mode, which "
                    "copies it"
                )
        if not files:
            raise FileNotFoundError(f"{source}: there are no files in {place}")
        return Offer(directory=checkpoint.path, files=files, staged=True, name=name, in_place=True)

    def _offer_local(self, checkpoint: Checkpoint, name: str, *, should_move: bool) -> Offer:
        directory = Path(checkpoint.path)
        if not checkpoint.is_local or not directory.is_dir():
            raise FileNotFoundError(
                f"report() received {checkpoint!r}, which is not a directory on this worker's "
                f"node ({os.uname().nodename}). A directory of checkpoint_dir() is moved by its "
                "report, so report it once; files in the run's storage need "
                "CheckpointUploadMode.NO_UPLOAD"
            )
        in_staging = self._staging.has_directory(directory)
        if not in_staging:
            check_directory(directory, self._reserved_directories)
        contents = (
            self._staging.scan_directory(directory) if in_staging else scan_directory(directory)
        )
        check_files(directory, contents, self._directory)
        # A checkpoint must hold what it needs: what a link leads to may be gone when it is loaded.
        if in_staging and contents.symlinks:
            with _raise_storage_errors():
                self._staging.replace_symlinks(directory)
        return Offer(
            directory=str(directory),
            files=contents.files,
            staged=self._sink.is_staged(directory),
            name=name,
            handed_over=should_move
            and not in_staging
            and can_move(directory, contents.files, self._directory),
        )

    def _copy_to_staging(self, offer: Offer, name: str) -> Offer:
        share = self._make_assigned_files(offer, offer.files, name)
        with _raise_storage_errors():
            if offer.handed_over:
                stage = self._staging.stage_moved(share, attempt=self._attempt)
                return self._offer_staged(stage, name)
            stage = self._staging.stage_files(share)
        staged = self._sink.is_staged(stage)
        return msgspec.structs.replace(offer, directory=str(stage), staged=staged)

    def _offer_staged(self, stage: Path, name: str) -> Offer:
        """Offer what was handed over and lies in the staging area now."""
        staged = self._sink.is_staged(stage)
        files = list_files(stage)
        return Offer(directory=str(stage), files=files, staged=staged, name=name, handed_over=True)

    def _make_assigned_files(
        self, offer: Offer, files: Sequence[FileEntry], name: str
    ) -> AssignedFiles:
        return AssignedFiles(
            Path(offer.directory), files, self._label, name, should_move=offer.handed_over
        )

    # -- following

    def persist_and_wait(self, index: int, offer: Offer) -> None:
        """See one checkpoint through: persist this rank's share, wait for the commit."""
        # Either may come first: a rank whose files all lie in the staging area, or in the share of
        # a lower rank, has nothing to persist.
        order = self._wait((Persist, index), (Committed, index))
        if isinstance(order, Persist):
            self._say(self._persist(index, offer, order))
            self._wait((Committed, index))
        # After the commit: until then these files may be the only ones.
        if self._is_in_staging(offer):
            remove_tree(Path(offer.directory))
        elif offer.handed_over:
            given = isinstance(order, Persist) and bool(order.files)
            self._staging.release_source(self._file_identities.pop(offer.name), given=given)

    def _is_in_staging(self, offer: Offer) -> bool:
        return self._staging.has_directory(Path(offer.directory))

    def _persist(self, index: int, offer: Offer, order: Persist) -> Persisted:
        function = self._upload_fns.pop(order.name, None)
        if function is not None:
            others = {file.path for file in offer.files} - {file.path for file in order.files}
            name = self._run_upload_fn(order.name, *function, others)
            return Persisted(index=index, directory="", name=name)
        with _raise_storage_errors():
            part = self._sink.persist(self._make_assigned_files(offer, order.files, order.name))
        directory = "" if part.directory is None else str(part.directory)
        return Persisted(index=index, directory=directory, checksums=part.checksums)

    def _run_upload_fn(
        self, name: str, upload_fn: CheckpointUploadFn, given: Checkpoint, others: set[str]
    ) -> str:
        """Have a function of the user's put a checkpoint somewhere; gives its name by that.

        `others`: the files that lower ranks give.
        """
        with warn_if_slow(f"checkpoint_upload_fn for checkpoint {name} of {self._label}"):
            uploaded = upload_fn(given, name)
        if not isinstance(uploaded, Checkpoint):
            raise TypeError(f"checkpoint_upload_fn must return a Checkpoint, found {uploaded!r}")
        place = self._checkpoints.get_in_place_name(uploaded)
        if uploaded == given and given.is_local and (place is None or is_external(place)):
            # It may be gone in the next moment, such as the folder of a `with` statement.
            self._copy_missing_files(Path(given.path), name, others)
            return name
        if place == name:
            return name
        return self._offer_in_place(uploaded, "checkpoint_upload_fn").name or name

    def _copy_missing_files(self, source: Path, name: str, others: set[str]) -> None:
        """Copy what lower ranks do not give to where a checkpoint of this name lies."""
        place = self._checkpoints.path(name)
        files = [file for file in list_files(source) if file.path not in others]
        if isinstance(place, RemotePath):
            place.upload_files(source, files)
        else:
            place.mkdir(parents=True, exist_ok=True)
            copy_files(source, place, files)
