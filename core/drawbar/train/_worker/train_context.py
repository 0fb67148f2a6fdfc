"""`TrainContext`: ranks of a worker and properties of its run."""

from __future__ import annotations

from typing import Any

from drawbar.train._driver_env import TuneTrial
from drawbar.train._storage.storage_context import StorageContext
from drawbar.train._worker.active_session import current_session
from drawbar.train._worker.session import Session


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
