"""ScriptTrainer: run a script on every worker."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

from drawbar.launch._backend import ScriptConfig
from drawbar.launch._module_check import require_module
from drawbar.launch._run_script import run_script
from drawbar.launch._script_command import ScriptCommand
from drawbar.launch._script_file import check_script, require_executable
from drawbar.launch._torchrun_options import TorchrunOptions
from drawbar.train import (
    Checkpoint,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)
from drawbar.train.run_modes import ProgramMode, RunMode

MAX_HEARTBEAT_INTERVAL_S = 5.0
HEARTBEATS_PER_HANG_TIMEOUT = 4


class ScriptTrainer(DataParallelTrainer):
    """Run a script on every worker, like torchrun.

    Each rank is a separate Python process with torchrun's variables and the driver's environment
    and working directory. The script may call `drawbar.train.report()` and similar functions, but
    does not need to.

    A script leaves state behind (modules, process groups, threads, a CUDA context), so every
    restart uses new processes, with a higher TORCHELASTIC_RESTART_COUNT. Ray's worker processes
    keep running and keep their GPUs. With `use_ray=False`, the ranks end with this process, and Ray
    is not imported. They are forked from a child process with the imports at the top of the script,
    unless `RunConfig.forkserver_preload` is an empty list.

    The driver prints the standard output and standard error of rank 0 unchanged. The log of each
    rank contains its complete output.

    `FailureConfig.hang_timeout` starts when a rank last wrote output or used the CPU. A process
    that uses less than 1 % of a core counts as waiting. A rank that spins while it waits for its
    GPU counts as active; NCCL's timeout ends it.

    `fit()` raises `WorkerGroupError` if a script fails. Its `worker_failures` are
    `ProgramFailedError`s with exit codes, and `exit_code_for()` returns the exit code of the run.

    Args:
        script: Path of the script, or module name with `is_module`.
        arguments: Arguments of the script.
        is_module: Whether `script` is a module name, as in `python -m`.
        is_executable: Whether `script` is a program that is executed without Python.
        use_ray: Whether Ray starts the processes. With False, all ranks are on this machine.
        environment: Environment variables for the script, in addition to those of this process.
            None removes a variable, also one of torchrun's, such as RANK.
        torchrun_options: Options of torchrun for the processes, such as `--tee` and `--log-dir`.
        scaling_config: Number of workers and their resources. `num_workers=0` is not supported.
        run_config: Run configuration: storage, restarts, callbacks. All environment variables of
            the driver are forwarded.
        metadata: See DataParallelTrainer.
        resume_from_checkpoint: See DataParallelTrainer.

    Raises:
        FileNotFoundError: The script does not exist.
        ModuleNotFoundError: The module does not exist.
        TypeError: An argument has the wrong type.
        ValueError: An argument has a wrong value, or the script is not a regular file.

    Example:
        ```python
        ScriptTrainer(
            "train.py", ["--epochs", "3"], scaling_config=ScalingConfig(num_workers=4)
        ).fit()
        ```
    """

    _use_ray = True  # `restore()` does not call `__init__`

    def __init__(
        self,
        script: str | os.PathLike[str],
        arguments: Sequence[str] = (),
        *,
        is_module: bool = False,
        is_executable: bool = False,
        use_ray: bool = True,
        environment: Mapping[str, str | None] | None = None,
        torchrun_options: TorchrunOptions | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        metadata: Mapping[str, object] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        if scaling_config is not None and scaling_config.max_workers == 0:
            raise ValueError(
                "ScriptTrainer does not support num_workers=0. Run the script with python to run "
                "it in one process."
            )
        run_config = run_config or RunConfig()
        if not use_ray:
            _check_runs_without_ray(run_config)
        self._use_ray = use_ray
        super().__init__(
            run_script,
            train_loop_config={
                "command": ScriptCommand(
                    _make_command_line(
                        script, arguments, is_module=is_module, is_executable=is_executable
                    ),
                    is_executable,
                    torchrun_options or TorchrunOptions(),
                    os.getpriority(os.PRIO_PROCESS, 0),
                    run_config.failure_config.max_failures,
                    _heartbeat_interval(run_config.failure_config),
                ),
                "environment": {**_startup_env(), **(environment or {})},
            },
            backend_config=ScriptConfig(),
            scaling_config=scaling_config,
            run_config=dataclasses.replace(run_config, forward_env=(*run_config.forward_env, "*")),
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )

    def get_run_mode(self, *, use_caller_thread: bool) -> RunMode:
        """See `DataParallelTrainer.get_run_mode`."""
        if self._use_ray:
            return super().get_run_mode(use_caller_thread=use_caller_thread)
        return ProgramMode(use_caller_thread=use_caller_thread)

    def get_script(self) -> tuple[str, bool]:
        """See `DataParallelTrainer.get_script`."""
        assert self.train_loop_config is not None  # set by __init__ and restore()
        first, *others = self.train_loop_config["command"].arguments
        return (others[0], True) if first == "-m" else (first, False)


def _check_runs_without_ray(config: RunConfig) -> None:
    """Reject settings that only Ray can apply."""
    for name, value in (
        ("detached", config.detached),
        ("worker_runtime_env", config.worker_runtime_env),
    ):
        if value:
            raise ValueError(
                f"use_ray=False does not support RunConfig.{name}={value!r}. Remove one of them."
            )


def _make_command_line(
    script: str | os.PathLike[str],
    arguments: Sequence[str],
    *,
    is_module: bool,
    is_executable: bool,
) -> tuple[str, ...]:
    """Return the arguments of `python`, or the command line of a program."""
    path = os.fspath(script)
    if is_executable:
        if is_module:
            raise ValueError("is_executable=True does not support is_module=True. Remove one.")
        require_executable(path)
        return (path, *arguments)
    if is_module:
        require_module(path)
        return ("-m", path, *arguments)
    check_script(path)
    return (path, *arguments)


def _startup_env() -> dict[str, str]:
    """Return variables that are read when Python starts: too late for workers, but not scripts."""
    return {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}


def _heartbeat_interval(failures: FailureConfig) -> float:
    timeout = failures.hang_timeout
    assert not isinstance(timeout, int | float)  # FailureConfig makes it a timedelta
    timeout = timeout or timedelta.max
    return min(MAX_HEARTBEAT_INTERVAL_S, timeout.total_seconds() / HEARTBEATS_PER_HANG_TIMEOUT)
