"""`DataParallelTrainer`: a training function, what it runs on, `fit()` and `start()`."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import json
import os
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, ClassVar, Self, TypeVar

import cloudpickle

from drawbar.train._config.argument_errors import ArgumentErrors
from drawbar.train._config.backend import BackendConfig, LauncherStore, TrainFunction
from drawbar.train._config.checks import resolve_config
from drawbar.train._config.data_config import DataConfig
from drawbar.train._config.function_identity import FunctionIdentity
from drawbar.train._config.run_config import RunConfig
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._config.validation_config import ValidationConfig
from drawbar.train._console.console import Console
from drawbar.train._controller.run import RunSpec
from drawbar.train._data import split
from drawbar.train._driver import preflight
from drawbar.train._driver.controller_thread import start_local_run, start_ray_run
from drawbar.train._driver.run_spec import make_run_spec
from drawbar.train._errors import DamagedRunError, without_internal_frames
from drawbar.train._handle.host_actor_run import start_host_actor_run
from drawbar.train._handle.run_handle import RunHandle, RunView
from drawbar.train._history.result import Result
from drawbar.train._serialization import Serialized
from drawbar.train._storage.checkpoint import Checkpoint
from drawbar.train._storage.filesystem import AnyFileSystem
from drawbar.train._storage.run_directory import open_run_directory
from drawbar.train._storage.run_files import TRAINER_FILE
from drawbar.train._worker.actor import TrainLoop
from drawbar.train._worker_group.cluster import connect_to_ray, has_started_ray, is_ray_client

T = TypeVar("T")


class DataParallelTrainer(ArgumentErrors):
    """Runs a training function on a group of Ray actors.

    Args:
        train_loop_per_worker: The training function, of no argument or one: the
            `train_loop_config`. It runs once per worker; inside it use `drawbar.train.report`,
            `get_context` and the other functions.
        train_loop_config: Passed to the function, usually a dict. Default: an empty one.
        backend_config: How the workers of a framework meet, such as `drawbar.torch.TorchConfig()`.
            Default: none.
        scaling_config: How many workers, on what.
        run_config: Where the run lies, restarts, checkpoints, callbacks.
        datasets: Datasets by name: of Ray Data, which are streamed; tables of pandas, Arrow or
            Hugging Face, paths of Parquet files, and map-style datasets of PyTorch's, which are
            split by row numbers; or functions that make one of these at each start. "train" is
            split evenly, the others are whole on each worker; `dataset_config` changes that.
        dataset_config: Which datasets are split.
        metadata: A JSON-able dict, found by `get_context().get_metadata()` and in every checkpoint.
        resume_from_checkpoint: A checkpoint, also of another run, that a new run starts from. A run
            that has checkpoints of its own goes on from those.
        validation_config: How checkpoints are validated for which `report` asks for it.

    Raises:
        TypeError, ValueError: An argument is wrong; the message says which, what was found and what
            to do.
    """

    _replacements: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("train_fn", "train_func", "train_loop"), "did you mean 'train_loop_per_worker'?"
    )
    _init_arguments: tuple[tuple[object, ...], dict[str, object]]

    def __new__(cls, *args: object, **arguments: object) -> Self:
        trainer = super().__new__(cls, *args, **arguments)
        # Here, since `__init__` of a subclass may change what it is given before it calls this
        # one's.
        trainer._init_arguments = args, arguments
        return trainer

    def __init__(
        self,
        train_loop_per_worker: TrainFunction,
        *,
        train_loop_config: dict[str, Any] | None = None,
        backend_config: BackendConfig | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, object] | None = None,
        dataset_config: DataConfig | None = None,
        metadata: Mapping[str, object] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
        validation_config: ValidationConfig | None = None,
    ) -> None:
        self.train_loop_per_worker = train_loop_per_worker
        self.train_loop_config = train_loop_config
        self.backend_config = resolve_config("backend_config", backend_config, BackendConfig)
        self.scaling_config = resolve_config("scaling_config", scaling_config, ScalingConfig)
        self.run_config = resolve_config("run_config", run_config, RunConfig)
        self.dataset_config = resolve_config("dataset_config", dataset_config, DataConfig)
        self.metadata = _check_json_dict("metadata", metadata)
        self.resume_from_checkpoint = resume_from_checkpoint
        if resume_from_checkpoint is not None:
            resolve_config("resume_from_checkpoint", resume_from_checkpoint, Checkpoint)
        self.validation_config = validation_config
        if validation_config is not None:
            resolve_config("validation_config", validation_config, ValidationConfig)
        self._takes_config = preflight.check_train_function(
            train_loop_per_worker, has_config=train_loop_config is not None
        )
        preflight.warn_of_unused_config(self._takes_config, train_loop_config)
        split.check_datasets(datasets, self.dataset_config)
        self.datasets: dict[str, Any] = dict(datasets or {})

    def fit(self) -> Result:
        """Run the training function to its end.

        Everything that can be checked is checked before a process starts. A local Ray is started if
        this process is not connected to one and `RAY_ADDRESS` names none. With `num_workers=0` no
        Ray is needed, and the function runs in the thread that called this; a `TorchTrainer` in
        several processes of one torchrun makes them the ranks of one run.

        Under Ray Client (`ray.init("ray://...")`), and for a `RunConfig(detached=True)`, the run is
        followed on the cluster: what is checked and where it lies is then a matter of the node
        there.

        Raises:
            TrainingFailedError: The run failed; its subclass and message say why.
            UserAbort: Ctrl-C stopped it; a detached run goes on.
            ResumeError: The run's directory and `RunConfig.resume` do not go together.
            TypeError, ValueError, ImportError, OSError: The run cannot start as configured.
        """
        try:
            return self._prepare_and_start(use_caller_thread=True).wait()
        except Exception as error:
            raise without_internal_frames(error)  # noqa: B904  # the same error

    def start(self) -> RunHandle:
        """Start the run and give a handle on it, which can wait for it, stop it and look at it.

        The checks of `fit()` are made before this returns. If the program ends first, the run is
        stopped, unless it is detached. With `num_workers=0` the function runs in a thread.

        Raises:
            As `fit()`, but for what happens once the run has started: `RunHandle.wait` raises that.
        """
        try:
            return self._prepare_and_start(use_caller_thread=False)
        except Exception as error:
            raise without_internal_frames(error)  # noqa: B904  # the same error

    def as_trainable(self) -> type[object]:
        """Give what `ray.tune.Tuner` takes; see `drawbar.tune.as_trainable`.

        Raises:
            ImportError: Ray Tune is not installed.
        """
        trainable: type[object] = importlib.import_module("drawbar.tune").as_trainable(self)
        return trainable

    @property
    def init_arguments(self) -> dict[str, Any]:
        """What it was made with, by name: `type(trainer)(**trainer.arguments)` is one like it.

        Raises:
            RuntimeError: `restore()` has made it.
        """
        args, given = self._init_arguments
        if not args and not given:
            raise RuntimeError(f"restore() has made this {type(self).__name__}; make one yourself")
        bound = inspect.signature(type(self).__init__).bind(self, *args, **given)
        arguments = dict(itertools.islice(bound.arguments.items(), 1, None))
        for each in bound.signature.parameters.values():
            if each.kind is each.VAR_KEYWORD:
                arguments.update(arguments.pop(each.name, {}))
        return arguments

    def _prepare_and_start(self, *, use_caller_thread: bool) -> RunHandle:
        # First of all: without the framework, what follows would fail in ways that do not say so.
        self.backend_config.check_requirements(self.scaling_config)
        payload = TrainLoop(
            self.train_loop_per_worker,
            self._takes_config,
            self.train_loop_config,
            self.backend_config,
        )
        spec = make_run_spec(
            payload,
            function=self._function_identity(),
            scaling_config=self.scaling_config,
            run_config=self.run_config,
            datasets=self.datasets,
            dataset_config=self.dataset_config,
            metadata=self.metadata,
            resume_from_checkpoint=self.resume_from_checkpoint,
            validation_config=self.validation_config,
        )
        return RunHandle(self._start_run(spec, payload, use_caller_thread=use_caller_thread))

    def _function_identity(self) -> FunctionIdentity:
        if self._script is None:
            return FunctionIdentity.of(self.train_loop_per_worker)
        script, is_module = self._script
        return FunctionIdentity.of_script(script, is_module=is_module)

    @property
    def _script(self) -> tuple[str, bool] | None:
        """Script that the training function runs, and whether it is a module; None if it is none.

        For trainers of integrations whose training function is the same for all scripts.
        """
        return None

    def _start_run(self, spec: RunSpec, payload: TrainLoop, *, use_caller_thread: bool) -> RunView:
        if self.scaling_config.max_workers == 0:
            self._check_not_detached()
            store = self.backend_config.get_launcher_store()
            host = start_local_run if store is None else _make_torchrun_starter(store)
            return host(
                spec,
                payload,
                self.validation_config,
                self._make_console,
                use_caller_thread=use_caller_thread,
            )
        # Only now: all that can be wrong with the arguments is said without waiting for Ray.
        connect_to_ray()
        if self.run_config.detached or is_ray_client():
            self._warn_if_driver_owns_ray()
            self._warn_if_driver_owns_objects(spec)
            return start_host_actor_run(spec)
        return start_ray_run(spec, self._make_console, use_caller_thread=use_caller_thread)

    def _make_console(self, path: str) -> Console:
        live = self.scaling_config.max_workers > 0
        return Console(self.run_config.logging_config.level_number, path, is_live=live)

    def _check_not_detached(self) -> None:
        if self.run_config.detached:
            raise ValueError(
                "RunConfig.detached=True needs workers that outlive this process, found "
                "ScalingConfig.num_workers=0, which runs the function in it"
            )

    def _warn_if_driver_owns_ray(self) -> None:
        if self.run_config.detached and has_started_ray():
            warnings.warn(
                "this process has started its own Ray, which ends with it, and so does the run in "
                "spite of RunConfig.detached=True; set RAY_ADDRESS, or ray.init(address=...), to a "
                "cluster that stays",
                stacklevel=5,
            )

    def _warn_if_driver_owns_objects(self, spec: RunSpec) -> None:
        carried = [
            spec.train_loop,
            *([spec.validation_task.function] if spec.validation_task else []),
        ]
        count = sum(each.num_owned_objects for each in carried)
        if self.run_config.detached and count:
            warnings.warn(
                "the training function, its config or the validation function refers to objects in "
                f"Ray's store that this process owns ({count}): they end with it, and ray.get then "
                "raises OwnerDiedError in the detached run. Keep this process until the run has "
                "got them, or have an actor that stays put them",
                stacklevel=5,
            )

    # -- restore

    @classmethod
    def can_restore(
        cls, path: str | os.PathLike[str], storage_filesystem: AnyFileSystem | None = None
    ) -> bool:
        """Whether `restore(path)` will find a run there."""
        directory = open_run_directory(path, storage_filesystem)
        return directory.run_files.read(TRAINER_FILE) is not None and directory.has_run()

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        storage_filesystem: AnyFileSystem | None = None,
        *,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, object] | None = None,
        **overrides: object,
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
                differ. One that refers to an object or an actor of Ray, also by a dataset that
                lies in the object store, must be given again: that ended with its Ray.

        Raises:
            FileNotFoundError: There is no run at `path`.
            DamagedRunError: Its `trainer.pkl` does not unpickle here.
            ValueError: What must be given again is missing.
        """
        directory = open_run_directory(path, storage_filesystem)
        packed = directory.run_files.read(TRAINER_FILE)
        if packed is None or not directory.has_run():
            raise FileNotFoundError(f"{directory.uri} holds no run that can be restored")
        place = directory.root / TRAINER_FILE
        state = _load_state(packed, place, exclude=overrides) | overrides
        config = dataclasses.replace(
            run_config or RunConfig(),
            name=directory.name,
            storage_path=directory.storage_fs_path,
            storage_filesystem=directory.filesystem,
        )
        # Not by `cls(...)`: subclasses take other arguments, which became these when the run was
        # made.
        trainer = cls.__new__(cls)
        DataParallelTrainer.__init__(trainer, run_config=config, datasets=datasets, **state)
        return trainer

    def __repr__(self) -> str:
        name = getattr(self.train_loop_per_worker, "__name__", self.train_loop_per_worker)
        return f"{type(self).__name__}({name}, {self.scaling_config!r}, {self.run_config!r})"


def _make_torchrun_starter(store: LauncherStore) -> Callable[..., RunView]:
    # Every worker's process imports this module, and few runs need multiprocessing's connections.
    from drawbar.train._handle.torchrun_run import start_or_join_torchrun_run

    return partial(start_or_join_torchrun_run, store)


def _load_state(
    serialized: bytes, path: object, *, exclude: Mapping[str, object]
) -> dict[str, Any]:
    try:
        kept: dict[str, Serialized] = cloudpickle.loads(serialized)
        lost = {
            name: each.missing_references
            for name, each in kept.items()
            if each.missing_references and name not in exclude
        }
        state = {
            name: kept[name].deserialize() for name in kept.keys() - lost.keys() - exclude.keys()
        }
    except Exception as error:  # damaged bytes raise whatever they make pickle do
        raise DamagedRunError(
            f"{path} does not unpickle here: {type(error).__name__}: {error}. Make the trainer "
            "anew with the run's name and storage_path; its fit() goes on from the newest "
            "checkpoint and replaces the file"
        ) from error
    if lost:
        again = ", ".join(f"{name}=..." for name in lost)
        raise ValueError(
            f"{' and '.join(lost)} held what ended with the Ray that it was in: "
            f"{', '.join(itertools.chain(*lost.values()))}. Give it again: restore(path, {again})"
        )
    return state


def _check_json_dict(name: str, value: Mapping[str, object] | None) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, found {value!r}")
    try:
        json.dumps(dict(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be JSON-able: {error}") from error
    return dict(value)
