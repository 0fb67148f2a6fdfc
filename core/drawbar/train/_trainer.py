"""DataParallelTrainer: run a training function on a group of workers."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import itertools
import os
from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar

from drawbar._base.api import ArgumentErrors
from drawbar._base.fields import resolve_config
from drawbar._base.frames import without_internal_frames
from drawbar._base.train_function import FunctionIdentity, TrainFunction
from drawbar._data.data_config import DataConfig
from drawbar._data.run_datasets import make_data_source
from drawbar._data.user_datasets import check_datasets
from drawbar._fork_server.forkserver_preload import check_preload
from drawbar._handle.exit_codes import use_exit_code
from drawbar._handle.result import Result
from drawbar._handle.run_handle import RunHandle
from drawbar._handle.run_view import RunMode
from drawbar._modes import preflight
from drawbar._modes.run_modes import LocalMode, RayMode, apply_backend_config
from drawbar._modes.run_spec import load_trainer_state, make_run_spec
from drawbar._modes.watchers import SAMPLERS
from drawbar._process.errors import UserAbort
from drawbar._storage.checkpoint import Checkpoint
from drawbar._storage.filesystem import AnyFileSystem
from drawbar._storage.run_directory import open_run_directory
from drawbar._storage.run_files import TRAINER_FILE
from drawbar.train._config.backend import BackendConfig
from drawbar.train._config.data_source import DataSource
from drawbar.train._config.run_config import RunConfig
from drawbar.train._config.scaling_config import ScalingConfig
from drawbar.train._config.validation_config import ValidationConfig
from drawbar.train._worker.train_loop import TrainLoop

T = TypeVar("T")


class DataParallelTrainer(ArgumentErrors):
    """Runs a training function on a group of Ray actors.

    Args:
        train_loop_per_worker: Training function without arguments, or with one, the
            `train_loop_config`. It runs once per worker and uses `drawbar.train.report`,
            `get_context`, and the other functions of `drawbar.train`.
        train_loop_config: Argument of the training function, usually a dict. Default: {}.
        backend_config: Sets up the process group of a framework, for example
            `drawbar.torch.TorchConfig()`. Default: none.
        scaling_config: Number of workers and their resources.
        run_config: Storage, restarts, checkpoints, and callbacks.
        datasets: Datasets by name. Datasets of Ray Data are streamed. Tables of pandas, Arrow, or
            Hugging Face, paths of Parquet files, and map-style PyTorch datasets are split by row
            numbers. A function that creates one of these is called at each start. "train" is split
            evenly between the workers, other datasets are complete on each worker;
            `dataset_config` changes that. Instead of the dict, it can be a
            `drawbar.train.backend.DataSource`.
        dataset_config: Which datasets are split, and how.
        metadata: JSON-serializable dict, available from `get_context().get_metadata()` and in every
            checkpoint.
        resume_from_checkpoint: Checkpoint from which a new run starts; it may be of another run. A
            run that has checkpoints resumes from its own.
        validation_config: Validation of the checkpoints for which `report` requests it.

    Raises:
        TypeError: An argument has a wrong type.
        ValueError: An argument has an invalid value. The message names it and how to fix it.

    Example:
        ```python
        def train_func(config):
            train.report({"loss": 1.0})

        trainer = DataParallelTrainer(train_func, scaling_config=train.ScalingConfig(num_workers=2))
        result = trainer.fit()
        ```
    """

    _replacements: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("train_fn", "train_func", "train_loop"), "did you mean 'train_loop_per_worker'?"
    )
    _init_arguments: tuple[tuple[object, ...], dict[str, object]]

    def __new__(cls, *args: object, **arguments: object) -> Self:
        trainer = super().__new__(cls, *args, **arguments)
        # Here, because `__init__` of a subclass may change its arguments before it calls ours.
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
        datasets: Mapping[str, object] | DataSource | None = None,
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
        self.metadata = preflight.check_json_dict("metadata", metadata)
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
        check_datasets(datasets, self.dataset_config)
        check_preload(self.run_config.forkserver_preload, self.run_config.worker_runtime_env)
        self.datasets: Any = datasets if isinstance(datasets, DataSource) else dict(datasets or {})

    def fit(self) -> Result:
        """Run the training function and wait for the result.

        Everything that can be checked is checked before a process starts. If this process
        is not connected to a cluster, `fit()` connects to `RAY_ADDRESS` or to a cluster that `ray
        start` has started on this machine; if there is neither, it starts Ray locally. With
        `num_workers=0`, Ray is not needed and the function runs in the calling thread. Under
        torchrun, a `TorchTrainer` uses the processes of torchrun as the ranks of one run.

        With Ray Client (`ray.init("ray://...")`) and `RunConfig(detached=True)`, the run is
        controlled on the cluster, where its storage is checked and resolved.

        Returns:
            The result of the run.

        Raises:
            TrainingFailedError: The run failed. The subclass and the message describe the cause.
            UserAbort: Ctrl-C stopped the run. A detached run continues.
            ResumeError: `RunConfig.resume` conflicts with the run directory.
            TypeError: An argument cannot be pickled.
            ValueError: The cluster cannot hold the run, or a setting is invalid.
            ImportError: A required package is not installed.
            OSError: The storage cannot be written.

        Example:
            ```python
            result = trainer.fit()
            print(result.metrics, result.checkpoint)
            ```
        """
        try:
            return self._prepare_and_start(use_caller_thread=True).wait()
        except (Exception, UserAbort) as error:
            raise without_internal_frames(use_exit_code(error))  # noqa: B904  # the same error

    def start(self) -> RunHandle:
        """Start the run and return a handle to wait for it, stop it, and inspect it.

        Performs the checks of `fit()`. If the program exits first, the run is stopped, unless it is
        detached. With `num_workers=0`, the function runs in a separate thread.

        Returns:
            A handle to the run.

        Raises:
            Exception: The run cannot start, as in `fit()`. `RunHandle.wait` raises later errors.

        Example:
            ```python
            run = trainer.start()
            result = run.wait()
            ```
        """
        try:
            return self._prepare_and_start(use_caller_thread=False)
        except Exception as error:
            raise without_internal_frames(error)  # noqa: B904  # the same error

    def as_trainable(self) -> type[object]:
        """Return a trainable for `ray.tune.Tuner`. See `drawbar.tune.as_trainable`.

        Returns:
            The trainable.

        Raises:
            ImportError: Ray Tune is not installed.

        Example:
            ```python
            tuner = tune.Tuner(trainer.as_trainable(), param_space={"train_loop_config": {...}})
            ```
        """
        trainable: type[object] = importlib.import_module("drawbar.tune").as_trainable(self)
        return trainable

    @property
    def init_arguments(self) -> dict[str, Any]:
        """Arguments of the constructor, by name.

        `type(trainer)(**trainer.init_arguments)` creates an equal trainer.

        Raises:
            RuntimeError: The trainer was created by `restore()`.
        """
        args, keyword_args = self._init_arguments
        if not args and not keyword_args:
            raise RuntimeError(
                f"this {type(self).__name__} was created by restore() and has no init_arguments. "
                "Create it with its constructor"
            )
        bound = inspect.signature(type(self).__init__).bind(self, *args, **keyword_args)
        arguments = dict(itertools.islice(bound.arguments.items(), 1, None))
        for parameter in bound.signature.parameters.values():
            if parameter.kind is parameter.VAR_KEYWORD:
                arguments.update(arguments.pop(parameter.name, {}))
        return arguments

    def _prepare_and_start(self, *, use_caller_thread: bool) -> RunHandle:
        # First: without the framework, the following steps would fail with unrelated errors.
        self.backend_config.check_requirements(self.scaling_config)
        train_loop = TrainLoop(
            self.train_loop_per_worker,
            self._takes_config,
            self.train_loop_config,
            self.backend_config,
        )
        spec = make_run_spec(
            train_loop,
            function=self._function_identity(),
            scaling_config=self.scaling_config,
            run_config=apply_backend_config(self.run_config, self.backend_config),
            data_source=make_data_source(self.datasets, self.dataset_config),
            dataset_config=self.dataset_config,
            metadata=self.metadata,
            resume_from_checkpoint=self.resume_from_checkpoint,
            validation_config=self.validation_config,
            samplers=SAMPLERS,
        )
        mode = self.get_run_mode(use_caller_thread=use_caller_thread)
        return RunHandle(mode.start(spec, train_loop))

    def _function_identity(self) -> FunctionIdentity:
        script = self.get_script()
        if script is None:
            return FunctionIdentity.of(self.train_loop_per_worker)
        path, is_module = script
        return FunctionIdentity.of_script(path, is_module=is_module)

    # -- for subclasses

    def get_run_mode(self, *, use_caller_thread: bool) -> RunMode:
        """Return the mode in which `fit()` and `start()` start the run.

        Override it to start runs in another way, with the names in `drawbar.train.run_modes`.

        Args:
            use_caller_thread: True for `fit()`, whose thread waits for the run. The training
                function may run in that thread, where `pdb` works and Ctrl-C arrives.

        Returns:
            The mode.

        Raises:
            ValueError: A setting conflicts with the mode.

        Example:
            ```python
            class LoggedTrainer(DataParallelTrainer):
                def get_run_mode(self, *, use_caller_thread):
                    return LoggedMode(super().get_run_mode(use_caller_thread=use_caller_thread))
            ```
        """
        if self.scaling_config.max_workers > 0:
            return RayMode(use_caller_thread)
        preflight.check_not_detached(self.run_config)
        store = self.backend_config.get_launcher_store()
        if store is None:
            return LocalMode(self.validation_config, use_caller_thread)
        # Here, because few runs need this module and its connections.
        from drawbar._modes.torchrun_run import LauncherMode

        return LauncherMode(store, self.validation_config, use_caller_thread)

    def get_script(self) -> tuple[str, bool] | None:
        """Return the script that the training function runs, and whether it is a module.

        Override it if the training function is the same for all scripts, so that a resume can
        compare the scripts.

        Returns:
            The script, or None (the default) if the training function is the user's.

        Example:
            ```python
            class MyScriptTrainer(DataParallelTrainer):
                def get_script(self):
                    return "train.py", False
            ```
        """
        return None

    # -- restore

    @classmethod
    def can_restore(
        cls, path: str | os.PathLike[str], storage_filesystem: AnyFileSystem | None = None
    ) -> bool:
        """Return whether `restore(path)` finds a run.

        Args:
            path: Run directory, as a path or URI.
            storage_filesystem: Filesystem of `path`, as in `RunConfig`.

        Returns:
            Whether the run can be restored.

        Example:
            ```python
            if DataParallelTrainer.can_restore(path):
                trainer = DataParallelTrainer.restore(path)
            ```
        """
        directory = open_run_directory(path, storage_filesystem)
        return directory.run_files.read(TRAINER_FILE) is not None and directory.has_run()

    @classmethod
    def restore(
        cls,
        path: str | os.PathLike[str],
        storage_filesystem: AnyFileSystem | None = None,
        *,
        run_config: RunConfig | None = None,
        datasets: Mapping[str, object] | DataSource | None = None,
        **overrides: object,
    ) -> Self:
        """Recreate the trainer of an earlier run. Its `fit()` resumes from the latest checkpoint.

        Args:
            path: Run directory, as a path or URI.
            storage_filesystem: Filesystem of `path`, as in `RunConfig`.
            run_config: Failure, checkpoint, and logging settings. Name and storage path come from
                `path`.
            datasets: Datasets; required again if the run had any.
            **overrides: New values for other arguments of `DataParallelTrainer`, except
                `resume_from_checkpoint`. An argument that refers to a Ray object or actor, also
                through a dataset, is required again, because a new Ray cluster does not have it.

        Returns:
            The trainer.

        Raises:
            FileNotFoundError: There is no run at `path`.
            DamagedRunError: The `trainer.pkl` of the run cannot be unpickled here.
            ValueError: A required argument is missing.

        Example:
            ```python
            result = DataParallelTrainer.restore("/shared/results/my-run").fit()
            ```
        """
        directory = open_run_directory(path, storage_filesystem)
        serialized = directory.run_files.read(TRAINER_FILE)
        if serialized is None or not directory.has_run():
            raise FileNotFoundError(f"{directory.uri} contains no run that can be restored")
        trainer_path = directory.root / TRAINER_FILE
        state = load_trainer_state(serialized, trainer_path, exclude=overrides) | overrides
        config = dataclasses.replace(
            run_config or RunConfig(),
            name=directory.name,
            storage_path=directory.storage_fs_path,
            storage_filesystem=directory.filesystem,
        )
        # Not `cls(...)`: subclasses take other arguments, which were converted to these.
        trainer = cls.__new__(cls)
        DataParallelTrainer.__init__(trainer, run_config=config, datasets=datasets, **state)
        return trainer

    def __repr__(self) -> str:
        name = getattr(self.train_loop_per_worker, "__name__", self.train_loop_per_worker)
        return f"{type(self).__name__}({name}, {self.scaling_config!r}, {self.run_config!r})"
