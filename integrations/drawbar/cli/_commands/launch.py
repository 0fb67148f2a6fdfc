"""drawbar launch: run a training script on several processes."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer.core import TyperCommand

from drawbar.cli._accelerate import OPTION as ACCELERATE_OPTION
from drawbar.cli._accelerate import mark_accelerate_options, request_workers
from drawbar.cli._arguments import parse_env, parse_stop_before
from drawbar.cli._exit_handling import StopSignals, wait_for_exit_code
from drawbar.cli._option_names import launch_errors
from drawbar.cli._output import CommandError
from drawbar.cli._ray_connection import (
    MINIMAL_CLUSTER,
    ClusterSize,
    connect_ray,
    disconnect_ray,
    is_connected_to_ray,
)
from drawbar.cli._ray_nodes import run_node, start_head
from drawbar.cli._rendezvous import Head, Rendezvous
from drawbar.cli._requested_workers import RequestedWorkers
from drawbar.cli._torchrun import (
    FLAGS,
    ONLY_TORCHRUN,
    SHARED,
    SHORT,
    TorchrunArguments,
    parse_torchrun_arguments,
)

if TYPE_CHECKING:
    from drawbar.launch import ScriptTrainer
    from drawbar.train import RunConfig


class LaunchCommand(TyperCommand):
    """Typer command that also accepts options of torchrun and Accelerate before the script name."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Store the options that only torchrun has in `ctx.meta[TORCHRUN_ARGUMENTS]`.

        Options that only Accelerate has become values of a hidden option.
        """
        names, flags = (
            {name for option in options for name in (*option.opts, *option.secondary_opts)}
            for options in (self.params, [o for o in self.params if getattr(o, "is_flag", False)])
        )
        torchrun = TorchrunArguments(args)
        # Completion passes incomplete command lines.
        with contextlib.suppress(*[CommandError] * ctx.resilient_parsing):
            known = {*names, *ctx.help_option_names, *ONLY_TORCHRUN, *SHARED, *SHORT}
            marked = mark_accelerate_options(args, known, {*flags, *ctx.help_option_names, *FLAGS})
            torchrun = parse_torchrun_arguments(marked, names, flags, os.environ)
        ctx.meta[TORCHRUN_ARGUMENTS] = torchrun
        if shell := torchrun.values.get("--print-completion"):
            _print_completion(shell)
        return super().parse_args(ctx, torchrun.remaining)

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Return the completions of a word, among them options that only torchrun has."""
        completions = super().shell_complete(ctx, incomplete)
        # Typer has its own copy of Click.
        make_item = type(super().shell_complete(ctx, "--")[0])
        names = [name for name in ONLY_TORCHRUN if incomplete and name.startswith(incomplete)]
        return [*completions, *map(make_item, names)]


def _print_completion(shell: str) -> NoReturn:
    """Print the completion of `drawbar`, like `--show-completion`, for a shell by name.

    Raises:
        CommandError: There is no completion for the shell.
    """
    if shell not in COMPLETED_SHELLS:
        raise CommandError(
            f"--print-completion must be one of {', '.join(COMPLETED_SHELLS)}; found {shell!r}."
        )
    # Typer's --show-completion detects the shell, and this variable names it.
    command = [sys.executable, "-m", "drawbar.cli"]
    environment = {**os.environ, "_DRAWBAR_COMPLETE": f"source_{shell}"}
    print(subprocess.check_output(command, env=environment, text=True), end="")
    raise typer.Exit


COMPLETED_SHELLS = ("bash", "zsh", "fish", "pwsh")
TORCHRUN_ARGUMENTS = "drawbar.torchrun_arguments"
LAUNCH_CONTEXT = {"allow_interspersed_args": False}  # arguments after the script belong to it


# The script
Script = Annotated[
    str, typer.Argument(metavar="SCRIPT", help="Script file, or module name with -m.")
]
ScriptArguments = Annotated[
    list[str] | None, typer.Argument(metavar="ARGS", help="Arguments of the script.")
]
IsModule = Annotated[
    bool, typer.Option("-m", "--module", help="Treat SCRIPT as a module name, like python -m.")
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
    str | None,
    typer.Option(metavar="N|gpu|xpu|cpu|auto", help="Processes per node, as in torchrun."),
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
        help="Directory or URI in which runs are stored. "
        " [default: DRAWBAR_STORAGE, or ~/drawbar_results]",
    ),
]
MaxFailures = Annotated[int, typer.Option(metavar="N", help="Maximum restarts; -1: no limit.")]
MaxRestarts = Annotated[
    int | None, typer.Option(metavar="N", help="torchrun's name for --max-failures.")
]
NoStopWhenDeterministic = Annotated[
    bool,
    typer.Option(
        "--no-stop-when-deterministic",
        help="Restart also if a failure is repeated.",
    ),
]
MaxTime = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Stop the run with a checkpoint after this time."),
]
StopBefore = Annotated[
    str | None,
    typer.Option(
        metavar="SECONDS|TIME",
        help="Stop the run with a checkpoint this long before the end of the Slurm job, or at this "
        "time, such as 2030-01-01T08:00.",
    ),
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
    context: typer.Context,
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
    no_stop_when_deterministic: NoStopWhenDeterministic = False,
    hang_timeout: HangTimeout = None,
    max_time: MaxTime = None,
    stop_before: StopBefore = None,
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
    torchrun: TorchrunArguments = context.meta[TORCHRUN_ARGUMENTS]
    requested, make_env = request_workers(
        RequestedWorkers(num_workers, nproc_per_node, nnodes, use_gpu, cpus_per_worker),
        accelerate_options or ([] if accelerate else None),
        parse_env(env or []),
        torchrun,
        [*(name for option in context.command.params for name in option.opts), *ONLY_TORCHRUN],
    )
    with launch_errors():
        run_config = _make_run_config(
            progress,
            max_failures=max_failures if max_restarts is None else max_restarts,
            hang_timeout=hang_timeout,
            stop_when_deterministic=not no_stop_when_deterministic,
            name=name,
            storage_path=storage_path,
            resume=resume,
            detached=detach,
            forkserver_preload=() if no_fork_server else None,
            max_time=max_time,
            stop_before=stop_before,
        )
        make_trainer = _bind_trainer(script, arguments or [], is_module, torchrun, run_config)
    if rendezvous := _find_rendezvous(torchrun, requested, address, standalone, detach=detach):
        _run_on_nodes(make_trainer, make_env, requested.for_this_node(), rendezvous)
    _run(make_trainer, make_env, requested, address, standalone=standalone, detach=detach)


def _bind_trainer(
    script: str,
    arguments: list[str],
    is_module: bool,
    torchrun: TorchrunArguments,
    run_config: RunConfig,
) -> Callable[..., ScriptTrainer]:
    from drawbar.launch import ScriptTrainer

    if is_module and torchrun.is_executable:
        raise CommandError("--no-python cannot be combined with --module. Remove one.")
    return partial(
        ScriptTrainer,
        script,
        arguments,
        is_module=is_module,
        is_executable=torchrun.is_executable,
        torchrun_options=torchrun.make_process_options(),
        run_config=run_config,
    )


def _find_rendezvous(
    torchrun: TorchrunArguments,
    requested: RequestedWorkers,
    address: str | None,
    standalone: bool,
    *,
    detach: bool,
) -> Rendezvous | None:
    """Return the rendezvous of the nodes that form a Ray cluster for this run, if there is one.

    Warns about options without effect.

    Raises:
        CommandError: Options conflict.
    """
    uses_other_ray = address or standalone or detach or "RAY_ADDRESS" in os.environ
    rendezvous = Rendezvous.from_options(torchrun.values, requested.nodes)
    if rendezvous is not None and (uses_other_ray or is_connected_to_ray()):
        if rendezvous.node_rank:
            raise CommandError(
                f"--node-rank {rendezvous.node_rank} would start the run again: a Ray cluster "
                "starts the processes on all of its nodes. Run the command on one node."
            )
        rendezvous = None
    for name, reason in torchrun.list_ignored(has_rendezvous=rendezvous is not None).items():
        print(f"drawbar: warning: Ignoring {name}: {reason}", file=sys.stderr)
    return rendezvous


def _make_run_config(
    progress: bool | None,
    *,
    max_failures: int,
    hang_timeout: float | None,
    stop_when_deterministic: bool,
    stop_before: str | None,
    **settings: Any,
) -> RunConfig:
    """Return the settings of the run.

    Args:
        progress: Whether to show the progress; None to show it on a terminal.
        max_failures: See `FailureConfig`.
        hang_timeout: See `FailureConfig`.
        stop_when_deterministic: See `FailureConfig`.
        stop_before: Time as text.
        settings: Other arguments of `RunConfig`.
    """
    from drawbar import train

    show_progress = sys.stderr.isatty() if progress is None else progress
    return train.RunConfig(
        failure_config=train.FailureConfig(
            max_failures=max_failures,
            hang_timeout=hang_timeout,
            stop_when_deterministic=stop_when_deterministic,
        ),
        # Off a terminal, the command prints only the script's output, like torchrun.
        logging_config=train.LoggingConfig("INFO" if show_progress else "WARNING"),
        stop_before=parse_stop_before(stop_before),
        **settings,
    )


def _run(
    make_trainer: Callable[..., ScriptTrainer],
    make_env: Callable[..., dict[str, str | None]],
    requested: RequestedWorkers,
    address: str | None,
    *,
    standalone: bool,
    detach: bool,
) -> None:
    """Start the run, wait for it unless it is detached, and exit with the script's exit code."""
    with launch_errors():
        # Report wrong options before Ray starts, which takes seconds.
        make_trainer(scaling_config=requested.to_scaling_config(MINIMAL_CLUSTER))
        has_connected = not is_connected_to_ray() and connect_ray(
            address, standalone=standalone, cpus=requested.cpus, must_outlive_process=detach
        )
        size = ClusterSize.current() if is_connected_to_ray() else ClusterSize.of_this_machine()
        config = requested.to_scaling_config(size)
        environment = make_env(config, uses_ray=size.uses_ray, starts_ray=standalone)
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


def _run_on_nodes(
    make_trainer: Callable[..., ScriptTrainer],
    make_env: Callable[..., dict[str, str | None]],
    requested: RequestedWorkers,
    rendezvous: Rendezvous,
) -> NoReturn:
    """Run the script on the nodes on which this command was started, and exit like `_run`."""
    with launch_errors():
        make_trainer(scaling_config=requested.to_scaling_config(MINIMAL_CLUSTER))
        listener = rendezvous.listen()
        if listener is None:
            code = run_node(rendezvous, requested.cpus_of_node)
        else:
            head = Head(rendezvous, listener)
            node_ids = start_head(head, requested.cpus_of_node)
            config = requested.to_scaling_config(ClusterSize.current(), node_ids)
            signals = StopSignals()
            environment = make_env(config, uses_ray=True, starts_ray=True)
            handle = make_trainer(scaling_config=config, environment=environment).start()
            code = wait_for_exit_code(handle, signals)
            head.close(code)
            disconnect_ray()
    raise typer.Exit(code)
