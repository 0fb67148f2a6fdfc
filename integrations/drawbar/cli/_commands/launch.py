"""drawbar launch: run a training script on several processes."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from drawbar.cli._accelerate import OPTION as ACCELERATE_OPTION
from drawbar.cli._accelerate import (
    make_script_env,
    mark_accelerate_options,
    read_accelerate_options,
)
from drawbar.cli._arguments import command_errors
from drawbar.cli._exit_handling import StopSignals, wait_for_exit_code
from drawbar.cli._output import CommandError
from drawbar.cli._ray_connection import (
    MINIMAL_CLUSTER,
    ClusterSize,
    connect_ray,
    disconnect_ray,
    is_connected_to_ray,
    num_local_cpus,
)
from drawbar.cli._torchrun import FLAGS as TORCHRUN_FLAGS
from drawbar.cli._torchrun import IGNORED, parse_range, remove_torchrun_options, resolve_num_workers
from drawbar.cli._torchrun import NAMES as TORCHRUN_NAMES

if TYPE_CHECKING:
    from drawbar.launch import ScriptTrainer
    from drawbar.train import RunConfig, ScalingConfig


class LaunchCommand(TyperCommand):
    """Typer command that also accepts options of torchrun and Accelerate before the script name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Remove torchrun options without effect, and mark options of Accelerate."""
        options = [option for option in self.params if option.param_type_name == "option"]
        flags = {"-h", "--help"} | _names(o for o in options if getattr(o, "is_flag", False))
        names = _names(options) | flags | TORCHRUN_NAMES
        marked = mark_accelerate_options(args, names, flags | TORCHRUN_FLAGS)
        remaining, ignored = remove_torchrun_options(marked, flags)
        for name in ignored:
            print(f"drawbar: warning: Ignoring {name}: {IGNORED[name]}", file=sys.stderr)
        return super().parse_args(ctx, remaining)


def _names(options: Iterable[Any]) -> set[str]:
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}


LAUNCH_CONTEXT = {"allow_interspersed_args": False}  # arguments after the script belong to it


# The script
Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="Script file, or module name with -m.")
]
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")
]
IsModule = Annotated[
    bool, typer.Option("-m", help="Treat SCRIPT as a module name, like python -m.")
]
Env = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help="Environment variable for the script. Can be repeated."
    ),
]
Accelerate = Annotated[
    bool,
    typer.Option(
        "--accelerate",
        help="Use the default file of 'accelerate config'. Options that only 'accelerate launch' "
        "has imply it.",
    ),
]
AccelerateOptions = Annotated[list[str] | None, typer.Option(ACCELERATE_OPTION, hidden=True)]

# Its processes
NumWorkers = Annotated[
    str | None,
    typer.Option(
        metavar="N|MIN:MAX",
        help="Number of processes; MIN:MAX makes the run elastic.  [default: 1]",
    ),
]
UseGpu = Annotated[
    bool | None,
    typer.Option(
        "--use-gpu/--no-gpu",
        help="Assign one GPU to each process.  [default: if there are enough GPUs]",
    ),
]
CpusPerWorker = Annotated[
    float | None, typer.Option(metavar="N", help="CPUs reserved for each process.")
]
NprocPerNode = Annotated[
    str | None, typer.Option(metavar="N|gpu|cpu|auto", help="Processes per node, as in torchrun.")
]
Nnodes = Annotated[
    str | None, typer.Option(metavar="N|MIN:MAX", help="Number of nodes, as in torchrun.")
]

NoForkServer = Annotated[
    bool,
    typer.Option(
        "--no-fork-server",
        help="Let each process import PyTorch and similar packages by itself.",
    ),
]

# The run
Name = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Name of the run. For an existing run, see --resume."),
]
StoragePath = Annotated[
    str | None,
    typer.Option(
        metavar="PATH",
        help="Directory or URI in which runs are stored.  [default: ~/drawbar_results]",
    ),
]
MaxFailures = Annotated[
    int, typer.Option(metavar="N", help="Maximum number of restarts; -1 for no limit.")
]
MaxRestarts = Annotated[
    int | None, typer.Option(metavar="N", help="torchrun's name for --max-failures.")
]
HangTimeout = Annotated[
    float | None,
    typer.Option(
        metavar="SECONDS", help="Fail if no rank writes output or uses the CPU for this long."
    ),
]
Resume = Annotated[
    str,
    typer.Option(
        metavar="auto|never|must", help="Whether to resume an existing run with the same name."
    ),
]
Detach = Annotated[
    bool, typer.Option("--detach", help="Start the run in the background and print its name.")
]
Progress = Annotated[
    bool | None,
    typer.Option(
        "--progress/--no-progress",
        help="Show the run's progress on standard error.  [default: only on a terminal]",
    ),
]

# The Ray cluster
Address = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Ray cluster to use.  [default: RAY_ADDRESS, a cluster on this machine, or none]",
    ),
]
Standalone = Annotated[
    bool, typer.Option("--standalone", help="Start a private Ray instance for this run.")
]


def launch(
    script: Script,
    arguments: ScriptArguments = None,
    num_workers: NumWorkers = None,
    use_gpu: UseGpu = None,
    cpus_per_worker: CpusPerWorker = None,
    no_fork_server: NoForkServer = False,
    is_module: IsModule = False,
    name: Name = None,
    storage_path: StoragePath = None,
    max_failures: MaxFailures = 0,
    hang_timeout: HangTimeout = None,
    resume: Resume = "auto",
    detach: Detach = False,
    env: Env = None,
    progress: Progress = None,
    accelerate: Accelerate = False,
    accelerate_options: AccelerateOptions = None,
    address: Address = None,
    standalone: Standalone = False,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = None,
    max_restarts: MaxRestarts = None,
) -> None:
    """Run a training script on several processes, like torchrun.

    Accepts the options of torchrun and of 'accelerate launch', and warns about those without
    effect. Exits with the script's exit code. Prints the output of rank 0; the run's logs contain
    the output of every rank.
    """
    if num_workers is not None and (nproc_per_node or nnodes):
        raise CommandError(
            "--num-workers cannot be combined with --nproc-per-node or --nnodes. Remove one."
        )
    has_num_workers = bool(num_workers or nproc_per_node or nnodes)
    accelerate_config = None
    if accelerate or accelerate_options:
        accelerate_config = read_accelerate_options(
            accelerate_options or [], has_num_workers=has_num_workers
        )
        if not has_num_workers:
            nproc_per_node, nnodes = accelerate_config.to_torchrun()
        if accelerate_config.use_cpu:
            use_gpu = bool(use_gpu)
    make_env = partial(
        make_script_env,
        accelerate_config,
        _parse_env(env or []),
        has_num_workers=has_num_workers,
    )
    requested = _RequestedWorkers(num_workers, nproc_per_node, nnodes, use_gpu, cpus_per_worker)
    restarts = max_failures if max_restarts is None else max_restarts
    with command_errors():
        from drawbar.launch import ScriptTrainer

        run_config = _make_run_config(
            name, storage_path, restarts, hang_timeout, resume, progress, detach=detach
        )
        if no_fork_server:
            run_config = dataclasses.replace(run_config, forkserver_preload=())
        make_trainer = partial(
            ScriptTrainer,
            script,
            arguments or [],
            is_module=is_module,
            run_config=run_config,
        )
    _run(make_trainer, make_env, requested, address, standalone=standalone, detach=detach)


def _make_run_config(
    name: str | None,
    storage_path: str | None,
    max_failures: int,
    hang_timeout: float | None,
    resume: str,
    progress: bool | None,
    *,
    detach: bool,
) -> RunConfig:
    from drawbar import train

    show_progress = sys.stderr.isatty() if progress is None else progress
    return train.RunConfig(
        name,
        storage_path,
        failure_config=train.FailureConfig(max_failures, hang_timeout=hang_timeout),
        resume=resume,  # type: ignore[arg-type]  # RunConfig validates it
        # Off a terminal, the command prints only the script's output, like torchrun.
        logging_config=train.LoggingConfig("INFO" if show_progress else "WARNING"),
        detached=detach,
    )


def _run(
    make_trainer: Callable[..., ScriptTrainer],
    make_env: Callable[..., dict[str, str | None]],
    requested: _RequestedWorkers,
    address: str | None,
    *,
    standalone: bool,
    detach: bool,
) -> None:
    """Start the run, wait for it unless it is detached, and exit with the script's exit code."""
    with command_errors():
        # Report wrong options before Ray starts, which takes seconds.
        make_trainer(scaling_config=requested.to_scaling_config(MINIMAL_CLUSTER))
        has_connected = not is_connected_to_ray() and connect_ray(
            address, standalone=standalone, cpus=requested.cpus, must_outlive_process=detach
        )
        size = ClusterSize.current() if is_connected_to_ray() else ClusterSize.of_this_machine()
        config = requested.to_scaling_config(size)
        environment = make_env(config, uses_ray=size.uses_ray)
        trainer = make_trainer(
            scaling_config=config, use_ray=size.uses_ray, environment=environment
        )
        if detach:
            print(trainer.start().name)
            return
        signals = StopSignals()
        handle = trainer.start()
    code = wait_for_exit_code(handle, signals)
    if has_connected:
        disconnect_ray()
    raise typer.Exit(code)


def _parse_env(assignments: Sequence[str]) -> dict[str, str]:
    variables = {}
    for assignment in assignments:
        name, equals, value = assignment.partition("=")
        if not name or not equals:
            raise CommandError(
                f"--env must be NAME=VALUE, found {assignment!r}. Variables of this shell are "
                "forwarded anyway."
            )
        variables[name] = value
    return variables


@dataclass(frozen=True)
class _RequestedWorkers:
    """Number of workers that the options request, which may depend on the cluster."""

    num_workers: str | None
    nproc_per_node: str | None
    nnodes: str | None
    use_gpu: bool | None
    cpus_per_worker: float | None

    @property
    def cpus(self) -> int:
        """Minimum CPUs of a new Ray instance. Like torchrun, allow more processes than cores.

        0 if the options do not name a number of processes per node.
        """
        text = self.nproc_per_node or ""
        return int(text) if text.isdecimal() else 0

    def to_scaling_config(self, cluster: ClusterSize) -> ScalingConfig:
        """Return the scaling config for a cluster of this size."""
        from drawbar.train import ScalingConfig

        workers: int | tuple[int, int]
        if self.nproc_per_node is None and self.nnodes is None:
            low, high = parse_range("--num-workers", self.num_workers or "1")
            workers, is_single_node = (low if low == high else (low, high)), False
        else:
            workers, is_single_node = resolve_num_workers(
                self.nproc_per_node or "1",
                self.nnodes or "1",
                gpus=cluster.max_gpus_per_node,
                cpus=cluster.max_cpus_per_node,
            )
        max_workers = workers if isinstance(workers, int) else workers[1]
        cpus = self.cpus_per_worker
        if cpus is None and not cluster.uses_ray:
            cpus = _share_cpus(cluster.max_cpus_per_node, num_local_cpus(self.cpus))
        return ScalingConfig(
            num_workers=workers,
            use_gpu=cluster.gpus >= max_workers if self.use_gpu is None else self.use_gpu,
            resources_per_worker=None if cpus is None else {"CPU": cpus},
            placement_strategy="STRICT_PACK" if is_single_node else "PACK",
        )


def _share_cpus(cores: int, num_processes: int) -> float | None:
    """Return the CPUs of each process if there are more processes than cores, else None."""
    # In ten-thousandths, in which CPUs are counted, and rounded down so that all processes fit.
    return 10_000 * cores // num_processes / 10_000 if num_processes > cores else None
