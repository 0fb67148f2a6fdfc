"""`drawbar launch`: run a script, as torchrun does. Its options, and what they mean."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperCommand

from drawbar.cli._exit_handling import StopSignals, command_errors, wait_for_exit_code
from drawbar.cli._output import CommandError
from drawbar.cli._ray_connection import MINIMAL_CLUSTER, ClusterSize, connect_ray, disconnect_ray
from drawbar.cli._torchrun import IGNORED, parse_range, remove_torchrun_options, resolve_num_workers

if TYPE_CHECKING:
    from drawbar.train import ScalingConfig


class LaunchCommand(TyperCommand):
    """The command, which takes torchrun's other options too, and what follows the script."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Tell torchrun's options and leave them out."""
        options = [each for each in self.params if getattr(each, "is_flag", False)]
        flags = {name for each in options for name in (*each.opts, *each.secondary_opts)}
        kept, ignored = remove_torchrun_options(args, flags)
        for name in ignored:
            print(f"drawbar: {name} changes nothing here: {IGNORED[name]}", file=sys.stderr)
        return super().parse_args(ctx, kept)


LAUNCH_CONTEXT = {"allow_interspersed_args": False}  # what follows the script is the script's


def launch(
    script: Annotated[
        str, typer.Argument(metavar="SCRIPT", help="Its path, or with -m the name of a module.")
    ],
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="ARGUMENTS", help="The script's own.")
    ] = None,
    num_workers: Annotated[
        str | None, typer.Option(metavar="N|LOW:HIGH", help="Processes; 2:8 is elastic.")
    ] = None,
    use_gpu: Annotated[
        bool | None,
        typer.Option("--use-gpu/--no-gpu", help="A GPU each; by default if there are enough."),
    ] = None,
    cpus_per_worker: Annotated[
        float | None, typer.Option(metavar="N", help="CPUs of each process.")
    ] = None,
    is_module: Annotated[bool, typer.Option("-m", help="SCRIPT is the name of a module.")] = False,
    name: Annotated[str | None, typer.Option(metavar="NAME", help="Name of the run.")] = None,
    storage_path: Annotated[
        str | None, typer.Option(metavar="PATH", help="Where runs lie, also an address.")
    ] = None,
    max_failures: Annotated[
        int, typer.Option(metavar="N", help="How often it may start anew; -1 without limit.")
    ] = 0,
    hang_timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Without output or work of any rank.")
    ] = None,
    resume: Annotated[
        str, typer.Option(metavar="auto|never|must", help="What to do with a run of this name.")
    ] = "auto",
    detach: Annotated[
        bool, typer.Option("--detach", help="Print the run's name, and let it go on.")
    ] = False,
    env: Annotated[
        list[str] | None, typer.Option(metavar="NAME=VALUE", help="A variable for the script.")
    ] = None,
    progress: Annotated[
        bool | None,
        typer.Option(
            "--progress/--no-progress",
            help="Show the run's progress on standard error; by default on a terminal.",
        ),
    ] = None,
    accelerate_config: Annotated[
        str | None, typer.Option(metavar="FILE", help="What accelerate config has written.")
    ] = None,
    address: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Of a Ray cluster.")
    ] = None,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="On a Ray of the command's own.")
    ] = False,
    nproc_per_node: Annotated[
        str | None, typer.Option(metavar="N|gpu|cpu|auto", help="As for torchrun.")
    ] = None,
    nnodes: Annotated[
        str | None, typer.Option(metavar="N|LOW:HIGH", help="As for torchrun.")
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(metavar="N", help="As for torchrun: --max-failures.")
    ] = None,
) -> None:
    """Run a training script on several processes, like torchrun.

    Accepts torchrun's options. Exits with the script's exit code. Rank 0 prints to this
    terminal; the output of every rank is saved in the run's logs.
    """
    if progress is None:
        progress = sys.stderr.isatty()
    if num_workers is not None and (nproc_per_node or nnodes):
        raise CommandError("give --num-workers, or --nproc-per-node and --nnodes")
    variables = _parse_env(env or [])
    if accelerate_config is not None:
        processes, by_accelerate = _read_accelerate_config(accelerate_config)
        variables = by_accelerate | variables
        num_workers = num_workers or (None if nproc_per_node or nnodes else str(processes))
    wanted = _RequestedWorkers(num_workers, nproc_per_node, nnodes, use_gpu, cpus_per_worker)
    with command_errors():
        from drawbar import train
        from drawbar.launch import ScriptTrainer

        failures = train.FailureConfig(
            max_failures if max_restarts is None else max_restarts, hang_timeout=hang_timeout
        )
        run_config = train.RunConfig(
            name,
            storage_path,
            failure_config=failures,
            resume=resume,  # type: ignore[arg-type]  # it is checked there
            # Off a terminal, the command prints only the script's output, like torchrun.
            logging_config=train.LoggingConfig("INFO" if progress else "WARNING"),
            detached=detach,
        )
        trainer_on = partial(
            ScriptTrainer,
            script,
            arguments or [],
            is_module=is_module,
            environment=variables,
            run_config=run_config,
        )
        trainer_on(
            scaling_config=wanted.to_scaling_config(MINIMAL_CLUSTER)
        )  # before Ray, which takes seconds
        joined = connect_ray(
            address, standalone=standalone, cpus=wanted.cpus, must_outlive_process=detach
        )
        trainer = trainer_on(scaling_config=wanted.to_scaling_config(ClusterSize.current()))
        if detach:
            print(trainer.start().name)
            return
        signals = StopSignals()
        handle = trainer.start()
    code = wait_for_exit_code(handle, signals)
    if joined:
        disconnect_ray()
    raise typer.Exit(code)


def _read_accelerate_config(path: str) -> tuple[int, dict[str, str]]:
    """Give the number of processes and the variables that a file of Accelerate's stands for."""
    with command_errors():
        from drawbar.launch import AccelerateLaunchConfig

        settings = AccelerateLaunchConfig.from_file(path)
    return settings.num_processes, settings.env


def _parse_env(given: Sequence[str]) -> dict[str, str]:
    variables = {}
    for each in given:
        name, equals, value = each.partition("=")
        if not name or not equals:
            raise CommandError(
                f"--env is NAME=VALUE, found {each!r}; all variables set here go too"
            )
        variables[name] = value
    return variables


@dataclass(frozen=True)
class _RequestedWorkers:
    """How many workers the options mean, which may depend on what Ray has."""

    num_workers: str | None
    nproc_per_node: str | None
    nnodes: str | None
    use_gpu: bool | None
    cpus_per_worker: float | None

    @property
    def cpus(self) -> int:
        """CPUs that a Ray of its own must have: torchrun starts more processes than cores, too."""
        asked = self.nproc_per_node or ""
        return int(asked) if asked.isdecimal() else 0

    def to_scaling_config(self, cluster: ClusterSize) -> ScalingConfig:
        """Give what is to be started on a cluster of this size."""
        from drawbar.train import ScalingConfig

        workers: int | tuple[int, int]
        if self.nproc_per_node is None and self.nnodes is None:
            low, high = parse_range("--num-workers", self.num_workers or "1")
            workers, is_single_node = (low if low == high else (low, high)), False
        else:
            workers, is_single_node = resolve_num_workers(
                self.nproc_per_node or "1",
                self.nnodes or "1",
                gpus=cluster.most_gpus,
                cpus=cluster.max_cpus_per_node,
            )
        max_workers = workers if isinstance(workers, int) else workers[1]
        return ScalingConfig(
            num_workers=workers,
            use_gpu=cluster.gpus >= max_workers if self.use_gpu is None else self.use_gpu,
            resources_per_worker=(
                None if self.cpus_per_worker is None else {"CPU": self.cpus_per_worker}
            ),
            placement_strategy="STRICT_PACK" if is_single_node else "PACK",
        )
