"""ScriptTrainer: the trainer for scripts that are no functions."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta

from drawbar.launch._backend import ScriptConfig
from drawbar.launch._module_check import require_module
from drawbar.launch._run_script import run_script
from drawbar.launch._script_file import check_script
from drawbar.train import (
    Checkpoint,
    DataParallelTrainer,
    FailureConfig,
    RunConfig,
    ScalingConfig,
)

MAX_HEARTBEAT_INTERVAL_S = 5.0
HEARTBEATS_PER_HANG_TIMEOUT = 4


class ScriptTrainer(DataParallelTrainer):
    """Run a script on every worker, as torchrun does.

        ScriptTrainer(
            "train.py", ["--epochs", "3"], scaling_config=ScalingConfig(num_workers=4)
        ).fit()

    Each rank is a Python process of its own, with torchrun's variables and the driver's own
    environment, in its working directory. The script may call `drawbar.train.report` and its
    companions, or know nothing of Drawbar. After a failure it starts anew, in a new process and
    with TORCHELASTIC_RESTART_COUNT raised: what a script leaves in its process (its modules' state,
    process groups, threads, a CUDA context) is not known to bear another start. Ray's worker
    processes stay, with their place and GPUs.

    The driver prints the standard output and standard error of rank 0, byte for byte. The log of
    each rank has its complete output.

    `FailureConfig.hang_timeout` counts from when any rank has last written or computed: a process
    that uses less than 1 % of a core counts as waiting. So a rank that spins while it waits for its
    GPU counts as alive; NCCL's own timeout ends it.

    Args:
        script: Its path, or with `is_module` the name of a module, as after `python -m`.
        arguments: Of the script.
        is_module: Whether `script` is the name of a module.
        environment: Variables for the script, besides those of this process.
        scaling_config: How many workers, on what; not `num_workers=0`.
        run_config: As for `DataParallelTrainer`. All variables of the driver are forwarded.
        metadata: As for `DataParallelTrainer`.
        resume_from_checkpoint: As for `DataParallelTrainer`.

    `fit()` raises a `WorkerGroupError` when a script has failed; its `worker_failures` are
    `ProgramFailedError`s with exit codes, and `exit_code_for` returns the exit code of the run.

    Raises:
        FileNotFoundError, ModuleNotFoundError: There is no such script or module.
        TypeError, ValueError: An argument is wrong, or the script is not a regular file.
    """

    def __init__(
        self,
        script: str | os.PathLike[str],
        arguments: Sequence[str] = (),
        *,
        is_module: bool = False,
        environment: Mapping[str, str] | None = None,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        metadata: Mapping[str, object] | None = None,
        resume_from_checkpoint: Checkpoint | None = None,
    ) -> None:
        if scaling_config is not None and scaling_config.max_workers == 0:
            raise ValueError(
                "ScriptTrainer needs processes of its own, found num_workers=0; start the script "
                "with python to run it in one process"
            )
        run_config = run_config or RunConfig()
        super().__init__(
            run_script,
            train_loop_config={
                "arguments": _python_arguments(script, arguments, is_module=is_module),
                "environment": {**_startup_env(), **(environment or {})},
                "niceness": os.getpriority(os.PRIO_PROCESS, 0),
                "max_restarts": run_config.failure_config.max_failures,
                "sign_seconds": _heartbeat_interval(run_config.failure_config),
            },
            backend_config=ScriptConfig(),
            scaling_config=scaling_config,
            run_config=dataclasses.replace(run_config, forward_env=(*run_config.forward_env, "*")),
            metadata=metadata,
            resume_from_checkpoint=resume_from_checkpoint,
        )

    @property
    def _script(self) -> tuple[str, bool]:
        assert self.train_loop_config is not None  # set by __init__, and again by restore()
        first, *others = self.train_loop_config["arguments"]
        return (others[0], True) if first == "-m" else (first, False)


def _python_arguments(
    script: str | os.PathLike[str], arguments: Sequence[str], *, is_module: bool
) -> list[str]:
    """Give what would follow `python`."""
    path = os.fspath(script)
    if is_module:
        require_module(path)
        return ["-m", path, *arguments]
    check_script(path)
    return [path, *arguments]


def _startup_env() -> dict[str, str]:
    """Give what is forwarded to no worker, whose Python has started, but to a script's can be."""
    return {name: os.environ[name] for name in ("PYTHONPATH",) if name in os.environ}


def _heartbeat_interval(failures: FailureConfig) -> float:
    timeout = failures.hang_timeout
    assert not isinstance(timeout, int | float)  # FailureConfig makes it a timedelta
    timeout = timeout or timedelta.max
    return min(MAX_HEARTBEAT_INTERVAL_S, timeout.total_seconds() / HEARTBEATS_PER_HANG_TIMEOUT)
