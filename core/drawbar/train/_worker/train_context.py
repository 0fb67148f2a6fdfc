"""`TrainContext` and `StorageContext`: ranks of a worker, and properties and files of its run."""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from drawbar._process.driver_env import TuneTrial
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.contents import list_files
from drawbar._storage.remote_path import RemotePath, upload_files
from drawbar._storage.run_directory import RunDirectory
from drawbar.train._worker.active_session import current_session
from drawbar.train._worker.session import Session

if TYPE_CHECKING:
    from pyarrow.fs import FileSystem


class TrainContext:
    """Ranks of this worker and properties of its run. Created by `get_context()`.

    Args:
        session: Session of the rank. Drawbar passes it.

    Example:
        >>> context = train.get_context()
        >>> if context.get_world_rank() == 0:
        ...     print(context.get_experiment_name(), context.get_world_size())
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._assignment = session.assignment

    def get_experiment_name(self) -> str:
        """Return the name of the run, `RunConfig.name`."""
        return self._assignment.run_directory.name

    def get_run_id(self) -> str:
        """Return the run's id, 32 hex digits. Restarts and resumes keep it."""
        return self._assignment.run_id

    def get_attempt(self) -> int:
        """Return the number of this attempt: 0 for the first, plus 1 per restart or resume."""
        return self._assignment.attempt

    def get_restart_count(self) -> int:
        """Return the number of restarts of the workers since `fit()` started or resumed the run."""
        return self._assignment.attempt - self._assignment.first_attempt

    def get_trial_name(self) -> str | None:
        """Return the name of the run's Ray Tune trial, or None outside of Ray Tune."""
        return self._trial.name if self._trial else None

    def get_trial_id(self) -> str | None:
        """Return the id of the run's Ray Tune trial, or None outside of Ray Tune."""
        return self._trial.id if self._trial else None

    def get_trial_dir(self) -> str | None:
        """Return the directory of the run's Ray Tune trial, or None outside of Ray Tune."""
        return self._trial.directory if self._trial else None

    def get_trial_resources(self) -> Any:
        """Return the trial's `ray.tune.PlacementGroupFactory`, or None outside of Ray Tune."""
        return self._trial.placement_group_factory.deserialize() if self._trial else None

    @property
    def _trial(self) -> TuneTrial | None:
        driver_env = self._assignment.spec.driver_env
        return driver_env.tune_trial if driver_env else None

    def get_world_size(self) -> int:
        """Return the number of workers."""
        return self._assignment.ranks.world_size

    def get_world_rank(self) -> int:
        """Return the rank of this worker among all workers, from 0."""
        return self._assignment.ranks.world_rank

    def get_local_rank(self) -> int:
        """Return the rank of this worker among the workers on its node, from 0."""
        return self._assignment.ranks.local_rank

    def get_local_world_size(self) -> int:
        """Return the number of workers on this node."""
        return self._assignment.ranks.local_world_size

    def get_node_rank(self) -> int:
        """Return the rank of this node among the nodes that have workers, from 0."""
        return self._assignment.ranks.node_rank

    def get_accelerator_ids(self) -> tuple[str, ...]:
        """Return the ids of the GPUs that Ray assigned to this worker.

        With `num_workers=0`, returns the first visible GPUs, as many as were requested.
        """
        return self._assignment.gpu_ids

    def get_storage(self) -> StorageContext:
        """Return the path and filesystem of the run directory."""
        return StorageContext(self._session.directory)

    def get_metadata(self) -> dict[str, Any]:
        """Return the `metadata` argument of the trainer."""
        return dict(self._assignment.spec.metadata)

    def diagnose(self) -> str:
        """Write the stacks of all ranks to `<run>/stacks` and return a summary of them.

        Raises:
            RuntimeError: Called in a forked child, or after the attempt has ended.
        """
        return current_session("get_context().diagnose").diagnose()

    @property
    def cache(self) -> dict[Any, Any]:
        """Dictionary that lives as long as this process, so a restart can reuse its values.

        Use it for objects that are expensive to load and do not change: a dataset, a tokenizer, a
        compiled model.
        """
        return self._session.cache

    def __repr__(self) -> str:
        ranks = self._assignment.ranks
        return (
            f"TrainContext({self.get_experiment_name()!r}, rank {ranks.world_rank} of "
            f"{ranks.world_size}, attempt {self.get_attempt()})"
        )


class StorageContext(os.PathLike[str]):
    """Directory of the run, for files that the training function stores there.

    It can be used as a path, as in `storage / "x"` or `open(storage / "x")`, and has the methods of
    `pathlib.Path`. For remote storage, the path is the work directory on this node, and the other
    attributes describe the storage. Names with a leading "." are reserved for Drawbar.

    Args:
        directory: Run directory. Drawbar passes it.

    Example:
        Write a file into the run directory on one worker:

            storage = train.get_context().get_storage()
            if train.get_context().get_world_rank() == 0:
                (storage / "vocabulary.txt").write_text(vocabulary)
    """

    def __init__(self, directory: RunDirectory) -> None:
        self._run_directory = directory
        self._path = directory.local_path

    @property
    def storage_filesystem(self) -> FileSystem:
        """`pyarrow.fs.FileSystem` of the run."""
        return self._run_directory.root.filesystem

    @property
    def storage_fs_path(self) -> str:
        """Path of the storage on its filesystem."""
        return self._run_directory.storage_fs_path

    @property
    def experiment_dir_name(self) -> str:
        """Name of the run."""
        return self._run_directory.name

    @property
    def experiment_fs_path(self) -> str:
        """Path of the run directory on its filesystem."""
        return self._run_directory.root.fs_path

    def build_checkpoint_path_from_name(self, checkpoint_name: str) -> str:
        """Return the path of a checkpoint on its filesystem.

        Args:
            checkpoint_name: Name of the checkpoint.

        Returns:
            The path, without a scheme.
        """
        return f"{self.experiment_fs_path}/{checkpoint_name}"

    def extract_checkpoint_dir_name_from_path(self, checkpoint_path: str) -> str:
        """Return the name of the checkpoint at a path, which is its path relative to the run.

        Args:
            checkpoint_path: Path on the filesystem of the run.

        Returns:
            The name, such as "checkpoint_000003" or "steps/10".

        Raises:
            ValueError: The path is not in the directory of the run.
        """
        prefix = f"{self.experiment_fs_path}/"
        name = checkpoint_path.rstrip("/").removeprefix(prefix)
        if name == checkpoint_path.rstrip("/"):
            raise ValueError(
                f"Checkpoint path {checkpoint_path!r} is not in the run directory "
                f"{self.experiment_fs_path}."
            )
        return name

    @staticmethod
    def make_default_checkpoint_dir_name() -> str:
        """Return a name with the current date and time.

        `report()` does not use it: its default name has the number of the report.
        """
        return f"checkpoint_{datetime.now():%Y-%m-%d_%H-%M-%S.%f}"

    def persist_current_checkpoint(
        self, checkpoint: Checkpoint, checkpoint_dir_name: str
    ) -> Checkpoint:
        """Copy the files of a checkpoint to the run and return the stored checkpoint.

        Use it in a `checkpoint_upload_fn` that does something before or after the upload.

        Args:
            checkpoint: Checkpoint to copy.
            checkpoint_dir_name: Name of the checkpoint in the run.

        Returns:
            The checkpoint in the storage of the run.

        Raises:
            CheckpointError: `checkpoint` does not exist.
            OSError: The storage cannot be written.
        """
        storage_path = self._run_directory.checkpoints.path(checkpoint_dir_name)
        if isinstance(storage_path, RemotePath):
            with checkpoint.as_directory() as source:
                upload_files(Path(source), storage_path, list_files(Path(source)))
        else:
            checkpoint.to_directory(storage_path)
        return Checkpoint.from_storage_path(storage_path)

    def __fspath__(self) -> str:
        return str(self._path)

    def __truediv__(self, name: str | os.PathLike[str]) -> Path:
        return self._path / name

    def __eq__(self, other: object) -> bool:
        return self._path == (other._path if isinstance(other, StorageContext) else other)

    def __hash__(self) -> int:
        return hash(self._path)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # not set yet while this object is being unpickled
            raise AttributeError(name)
        return getattr(self._path, name)

    def __str__(self) -> str:
        return str(self._path)

    def __repr__(self) -> str:
        return f"StorageContext({self._run_directory.uri!r})"
