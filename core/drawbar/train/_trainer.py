"""`DataParallelTrainer`: a training function, what it runs on, and `fit()`."""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import PurePath
from typing import TYPE_CHECKING, Any, Self, TypeVar

import cloudpickle
import ray

from drawbar.train import _data, _environment, _placement, _preflight
from drawbar.train._callback import Callbacks, RunContext
from drawbar.train._checkpoint import Checkpoint
from drawbar.train._config import DataConfig, RunConfig, ScalingConfig, fields_of
from drawbar.train._console import Console
from drawbar.train._controller import Controller
from drawbar.train._exact_split import ExactSplits
from drawbar.train._files import write_atomically
from drawbar.train._journal import AttemptStarted
from drawbar.train._launch import Job, OpenRun, connect_to_ray, directory_of, host, open_run
from drawbar.train._local import LocalWorkerGroup
from drawbar.train._messages import Finished, Ranks, WorkerInfo
from drawbar.train._remote import open_directory
from drawbar.train._result import Result
from drawbar.train._run import Outcome, Run
from drawbar.train._session import Assignment
from drawbar.train._storage import RunDirectory
from drawbar.train._validation import ValidationConfig
from drawbar.train._validator import RayValidator, ThreadValidator, ValidationWork, Validator
from drawbar.train._worker import Payload
from drawbar.train._worker_group import RayWorkerGroup, WorkerGroup
from drawbar.train.backend import BackendConfig

if TYPE_CHECKING:
    from ray.data import Dataset

T = TypeVar("T")

TrainFunction = Callable[[], Any] | Callable[[dict[str, Any]], Any]


class DataParallelTrainer:
    """Runs a training function on a group of Ray actors.

    Args:
        train_loop_per_worker: The training function, of no argument or one: the
            `train_loop_config`. It runs once per worker; inside it use `drawbar.train.report`,
            `get_context` and the other functions.
        train_loop_config: Passed to the function. Default: an empty dict.
        backend_config: How the workers of a framework meet, such as `drawbar.torch.TorchConfig()`.
            Default: none.
        scaling_config: How many workers, on what.
        run_config: Where the run lies, restarts, checkpoints, callbacks.
        datasets: Ray Data datasets by name, or functions that make them. "train" is split evenly
            and streamed, the others are whole on each worker; `dataset_config` changes that.
        dataset_config: Which datasets are split.
        metadata: A JSON-able dict, found by `get_context().get_metadata()` and in every checkpoint.
        resume_from_checkpoint: A checkpoint, also of another run, that a new run starts from. A run
            that has checkpoints of its own goes on from those.
        validation_config: How checkpoints are validated for which `report` asks for it.

    Raises:
        TypeError, ValueError: An argument is wrong; the message says which, what was found and what
            to do.
    """

    def __init__(
        self,
        train_loop_per_worker: TrainFunction,
        *,
        train_loop_config: dict[str, Any] | None = None,
        backend_config: BackendConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Dataset | Callable[[], Dataset]] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, Any] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        validation_config: ValidationConfig | None = None,
    ) -> None:
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = train_loop_config
        self.backend_config = _instance("backend_config", backend_config, BackendConfig)
        self.scaling_config = _instance("scaling_config", scaling_config, ScalingConfig)
        self.run_config = _instance("run_config", run_config, RunConfig)
        self.dataset_config = _instance("dataset_config", dataset_config, DataConfig)
        self.metadata = _json_dict("metadata", metadata)
        self.resume_from_checkpoint = resume_from_checkpoint
        if resume_from_checkpoint is not None:
            _instance("resume_from_checkpoint", resume_from_checkpoint, Checkpoint)
        self.validation_config = validation_config
        if validation_config is not None:
            _instance("validation_config", validation_config, ValidationConfig)
        self._takes_config = _preflight.check_function(
            train_loop_per_worker, has_config=train_loop_config is not None
        )
        _preflight.check_config(self._takes_config, train_loop_config)
        _data.check_datasets(datasets, self.dataset_config)
        self.datasets = dict(datasets or {})

    def fit(self) -> Result:
        """Run the training function to its end.

        Everything that can be checked is checked before a process starts. A local Ray is started if
        this process is not connected to one and `RAY_ADDRESS` names none. With `num_workers=0` no
        Ray is needed.

        Raises:
            TrainingFailedError: The run failed; its subclass and message say why.
            UserAbort: Ctrl-C stopped it.
            ResumeError: The run's directory and `RunConfig.resume` do not go together.
            TypeError, ValueError, ImportError, OSError: The run cannot start as configured.
        """
        self.backend_config.preflight(self.scaling_config)
        work = self._payload()
        _preflight.check_pickles("train_loop_config", work.config)
        if self.validation_config is not None:
            _preflight.check_pickles("validation_config.fn", self.validation_config.fn)
        pickled = _preflight.pickle_function(work.function) and cloudpickle.dumps(work)
        directory = directory_of(self.run_config)
        self._connect()
        opened = open_run(directory, self.run_config, self._settings())
        level = self.run_config.logging_config.level
        console = Console(level, directory.location, live=self.scaling_config.max_workers > 0)
        try:
            self._save(directory)
            directory.publish(everything=True)
            outcome = self._run(opened, work, pickled, console)
        finally:
            opened.journal.close()
            directory.publish(everything=True)
            console.close()
        if outcome.error is not None:
            raise outcome.error
        return self._result(directory, outcome)

    def _settings(self) -> dict[str, Any]:
        """Give what a resumed run compares with the last start, key by key."""
        function = self.train_loop_per_worker
        return {
            "train_loop_per_worker": getattr(function, "__qualname__", repr(function)),
            "train_loop_config": {
                str(key): repr(value) for key, value in (self.train_loop_config or {}).items()
            },
            "scaling_config": fields_of(self.scaling_config),
            "failure_config": fields_of(self.run_config.failure_config),
            "checkpoint_config": fields_of(self.run_config.checkpoint_config),
            "validation_config": self.validation_config and self.validation_config.as_settings(),
        }

    def _payload(self) -> Payload:
        return Payload(
            self.train_loop_per_worker,
            self._takes_config,
            self.train_loop_config or {},
            self.backend_config,
        )

    def _run(self, opened: OpenRun, work: Payload, pickled: bytes, console: Console) -> Outcome:
        if opened.warning:
            console.notice(opened.warning)
        start_from = self.resume_from_checkpoint
        if start_from is not None and not opened.directory.intact_checkpoints():
            start_from.require()
        run = Run(
            run_id=opened.run_id,
            directory=opened.directory,
            config=self.run_config,
            backend_config=self.backend_config,
            metadata=self.metadata,
            first_attempt=opened.first_attempt,
            checkpoint=start_from.path if start_from else None,
            spent=opened.spent,
            validator=self._make_validator(),
        )
        context = RunContext(
            name=opened.name,
            run_id=opened.run_id,
            path=opened.directory.location,
            scaling_config=self.scaling_config,
            run_config=self.run_config,
        )
        callbacks = Callbacks(self.run_config.callbacks, context)

        def make_controller(in_this_thread: Callable[[Job], None]) -> Controller:
            group = self._make_group(str(opened.directory.path), work, pickled, in_this_thread)
            log = opened.journal.append
            return Controller(run, _Plan(self, opened), group, log, console, callbacks)

        try:
            return host(make_controller, context.path)
        finally:
            callbacks.close()

    def _connect(self) -> None:
        """Make sure of a cluster that can hold the workers."""
        if self.scaling_config.max_workers:
            connect_to_ray()
            _placement.check_cluster(self.scaling_config)
            _placement.check_data(self.scaling_config, _data.lazy(self.datasets))
            if self.validation_config is not None:
                _placement.check_validation(self.validation_config.resources)

    def _make_validator(self) -> Validator | None:
        if self.validation_config is None:
            return None
        if not self.scaling_config.max_workers:
            return ThreadValidator(self.validation_config)
        environment = _environment.forwarded(os.environ, self.run_config.forward_env)
        runtime_env = self.run_config.worker_runtime_env
        work = ValidationWork.of(self.validation_config, environment, runtime_env)
        return RayValidator(work)

    def _make_group(
        self, path: str, work: Payload, pickled: bytes, in_this_thread: Callable[[Job], None]
    ) -> WorkerGroup:
        if not self.scaling_config.max_workers:
            gpus = math.ceil(self.scaling_config.num_gpus_per_worker)
            gpu_ids = _environment.local_gpu_ids(gpus)
            return LocalWorkerGroup(work, spawn=in_this_thread, gpu_ids=gpu_ids)
        runtime_env = self.run_config.worker_runtime_env
        return RayWorkerGroup(self.scaling_config, path, pickled, runtime_env)

    def _result(self, directory: RunDirectory, outcome: Outcome) -> Result:
        result = Result.of(directory)
        for rank in sorted(outcome.values):
            finished = outcome.values[rank]
            result.return_values.append(_unpickled(rank, finished))
        return result

    # -- restore

    def _save(self, directory: RunDirectory) -> None:
        keep: tuple[str, ...]
        keep = ("train_loop_per_worker", "train_loop_config", "backend_config", "scaling_config")
        keep += ("dataset_config", "metadata", "validation_config")
        state = {name: getattr(self, name) for name in keep}
        write_atomically(directory.trainer, cloudpickle.dumps(state))

    @classmethod
    def can_restore(
        cls, path: str | os.PathLike[str], storage_filesystem: Any | None = None
    ) -> bool:
        """Whether `restore(path)` will find a run there."""
        directory = open_directory(path, storage_filesystem)
        directory.fetch()
        return directory.journal.exists() and directory.trainer.exists()

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        storage_filesystem: Any | None = None,
        *,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, Dataset | Callable[[], Dataset]] | None = None,
        **changed: Any,
    ) -> Self:
        """Make the trainer of an earlier run again; its `fit()` goes on from the newest checkpoint.

        Args:
            path: The run's directory, or its URI.
            storage_filesystem: The filesystem that `path` lies on, as for `RunConfig`.
            run_config: Failure, checkpoint and logging settings; name and storage path come from
                `path`.
            datasets: Must be given again if the run had any.
            changed: Any of `train_loop_per_worker`, `train_loop_config`, `backend_config`,
                `scaling_config`, `dataset_config`, `metadata`, `validation_config` that is to
                differ.

        Raises:
            FileNotFoundError: There is no run at `path`.
        """
        directory = open_directory(path, storage_filesystem)
        if not cls.can_restore(path, storage_filesystem):
            raise FileNotFoundError(f"{directory.location} holds no run that can be restored")
        state = cloudpickle.loads(directory.trainer.read_bytes()) | changed
        import dataclasses

        config = dataclasses.replace(
            run_config or RunConfig(),
            name=directory.name,
            storage_path=directory.parent,
            storage_filesystem=directory.filesystem,
        )
        trainer = cls.__new__(cls)
        DataParallelTrainer.__init__(trainer, run_config=config, datasets=datasets, **state)
        return trainer

    def __repr__(self) -> str:
        name = getattr(self.train_loop_per_worker, "__name__", self.train_loop_per_worker)
        return f"{type(self).__name__}({name}, {self.scaling_config!r}, {self.run_config!r})"


class _Plan:
    """What this trainer has each attempt's workers do."""

    def __init__(self, trainer: DataParallelTrainer, opened: OpenRun) -> None:
        self._trainer = trainer
        self._opened = opened
        self._exact_splits = ExactSplits()
        self._in_ray = ray.is_initialized()
        self._environment = _environment.forwarded(os.environ, trainer.run_config.forward_env)

    def assignments(
        self, start: AttemptStarted, workers: Sequence[WorkerInfo], ranks: Sequence[Ranks]
    ) -> list[Assignment]:
        """Say what each slot is to do."""
        places = list(zip(workers, ranks, strict=True))
        by_rank = [worker for worker, _ in sorted(places, key=lambda each: each[1].world_rank)]
        checkpoint = self._checkpoint_of(start)
        manifest = checkpoint.manifest if checkpoint else None
        positions = manifest.positions if manifest else {}
        shards = self._shards([worker.node_id for worker in by_rank], positions)
        resources = self._trainer.scaling_config.resources_per_worker
        validation = self._trainer.validation_config
        return [
            Assignment(
                run_name=self._opened.name,
                run_id=self._opened.run_id,
                directory=self._opened.directory,
                attempt=start.attempt,
                first_index=start.first_index,
                checkpoint=checkpoint,
                ranks=each,
                metadata=self._trainer.metadata,
                gpu_ids=worker.gpu_ids,
                environment=self._environment_of(worker, workers),
                cpus=resources.get("CPU") if resources else None,
                working_directory=os.getcwd(),
                import_paths=tuple(sys.path),
                shards=shards[each.world_rank],
                positions=positions,
                validation=validation.defaults if validation else None,
            )
            for worker, each in places
        ]

    def _checkpoint_of(self, start: AttemptStarted) -> Checkpoint | None:
        """Give the checkpoint that the journal names: of this run, or the one it began with."""
        if start.checkpoint is None:
            return None
        began_with = self._trainer.resume_from_checkpoint
        if began_with is not None and began_with.path == start.checkpoint:
            return began_with
        return self._opened.directory.checkpoint(PurePath(start.checkpoint).name)

    def _environment_of(self, worker: WorkerInfo, workers: Sequence[WorkerInfo]) -> dict[str, str]:
        if not self._trainer.backend_config.backend_cls.share_cuda_visible_devices:
            return self._environment
        if not worker.gpu_ids:
            return self._environment
        neighbours = [each for each in workers if each.node_id == worker.node_id]
        devices = _environment.visible_devices(neighbours)
        return {**self._environment, "CUDA_VISIBLE_DEVICES": devices}

    def _shards(self, node_ids: Sequence[str], positions: Mapping[str, Any]) -> list[Any]:
        datasets, config = self._trainer.datasets, self._trainer.dataset_config
        if not datasets:
            return [None] * len(node_ids)
        made = _data.make(datasets)
        _placement.check_data(self._trainer.scaling_config, _data.lazy(made))
        shards = _data.shard(made, config, node_ids, positions, self._exact_splits)
        local = self._trainer.scaling_config.max_workers == 0
        return list(shards) if local else [ray.put(each) for each in shards]

    def waiting_for(self) -> str:
        """Say what the workers that have not started are waiting for."""
        scaling = self._trainer.scaling_config
        bundles = [scaling.bundle] * scaling.min_workers
        return _placement.missing(_placement.node_shapes(), bundles)

    def draining(self) -> dict[str, int]:
        """Give the nodes that are about to go."""
        return _placement.draining_nodes() if self._in_ray else {}


def _unpickled(rank: int, finished: Finished) -> Any:
    """Give a rank's return value; one that cannot be had is told, and does not fail the run."""
    if finished.value is None:
        return None  # the console has said why
    try:
        return cloudpickle.loads(finished.value)
    except Exception as error:
        why = f"it does not unpickle here: {error!r}"
        warnings.warn(f"the return value of rank {rank} is lost: {why}", stacklevel=4)
        return None


def _instance(name: str, value: T | None, kind: type[T]) -> T:
    if value is None:
        return kind()
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be a {kind.__name__}, found {value!r}")
    return value


def _json_dict(name: str, value: Mapping[str, Any] | None) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, found {value!r}")
    try:
        json.dumps(dict(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be JSON-able: {error}") from error
    return dict(value)
