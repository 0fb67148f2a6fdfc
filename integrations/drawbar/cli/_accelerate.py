"""Options of `accelerate launch`, which Accelerate itself translates.

A command line is Accelerate's if it contains `--accelerate`, or an option that neither Drawbar nor
torchrun has.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING

from drawbar.cli._output import CommandError

if TYPE_CHECKING:
    from drawbar.cli._requested_workers import RequestedWorkers
    from drawbar.cli._torchrun import TorchrunArguments
    from drawbar.launch import AccelerateLaunchConfig
    from drawbar.train import ScalingConfig

OPTION = "--accelerate-option"
"""Hidden option of Drawbar that contains one option of Accelerate."""

FLAGS = frozenset(
    {
        "--cpu",
        "--debug",
        "--downcast-bf16",
        "--dynamo-use-dynamic",
        "--dynamo-use-fullgraph",
        "--dynamo-use-regional-compilation",
        "--enable-cpu-affinity",
        "--fp8-use-autocast-during-eval",
        "--ipex",
        "--multi-gpu",
        "--no-tpu-cluster",
        "--quiet",
        "--same-network",
        "--tpu",
        "--tpu-cluster",
        "--tpu-use-sudo",
        "--use-deepspeed",
        "--use-fsdp",
        "--use-megatron-lm",
        "--use-mps-device",
        "--use-parallelism-config",
        "--use-tp",
        "--use-xpu",
        "-q",
    }
)
"""Options of Accelerate 1.0 to 1.15 that take no value."""

_RENDEZVOUS = "Drawbar sets up the rendezvous."
_NODES = "Drawbar starts the processes, on a cluster with Ray."
_TPU = "it is only for TPUs."
_SAGEMAKER = "it is only for Amazon SageMaker."

IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "--main-process-ip": _RENDEZVOUS,
        "--main-process-port": _RENDEZVOUS,
        "--same-network": _RENDEZVOUS,
        "--machine-rank": _RENDEZVOUS,
        "--mpirun-hostfile": _NODES,
        "--deepspeed-hostfile": _NODES,
        "--deepspeed-exclusion-filter": _NODES,
        "--deepspeed-inclusion-filter": _NODES,
        "--deepspeed-multinode-launcher": _NODES,
        "--quiet": "Drawbar prints no stack trace of a launcher.",
        "--main-training-function": _TPU,
        "--no-tpu-cluster": _TPU,
        "--tpu-use-sudo": _TPU,
        "--vm": _TPU,
        "--downcast-bf16": _TPU,
        "--aws-access-key-id": _SAGEMAKER,
        "--aws-secret-access-key": _SAGEMAKER,
    }
)
"""Options without effect, with the reason that is printed."""

_IS_TYPO = 0.85
"""Similarity of a mistyped option. Accelerate's names are less similar to Drawbar's."""

_SHORT = {"-q": "--quiet"}
_TORCHRUN_VARIABLES = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS"),
    "TORCHELASTIC_USE_AGENT_STORE",
)
_NEEDS_ACCELERATOR = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_FSDP": "FSDP",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
}


def mark_accelerate_options(
    arguments: Sequence[str], names: Collection[str], flags: Collection[str]
) -> list[str]:
    """Replace options that Drawbar does not have by `--accelerate-option=OPTION`.

    The beginning of an option of Drawbar or torchrun remains, and also a mistyped one, so that the
    error suggests the right one.

    Args:
        arguments: Options, the script, and the arguments of the script, which are not changed.
        names: Options of Drawbar and torchrun, with hyphens.
        flags: Those of them that take no value.
    """
    remaining, marked = list(arguments), list[str]()
    while remaining and remaining[0].startswith("-") and remaining[0] not in ("-", "--"):
        argument = remaining.pop(0)
        option, equals, _ = argument.partition("=")
        name = option.replace("_", "-")
        if not argument.startswith("--") and len(argument) > 2:  # -t3; Accelerate has none
            marked.append(argument)
            continue
        is_flag = equals or name in flags or name in FLAGS
        # The last argument is the script, also if an unknown option precedes it.
        values = [] if is_flag or (name not in names and len(remaining) == 1) else remaining[:1]
        del remaining[: len(values)]
        is_beginning = name not in FLAGS and any(other.startswith(name) for other in names)
        if name in names or is_beginning or difflib.get_close_matches(name, names, cutoff=_IS_TYPO):
            marked += [argument, *values]
        else:
            marked.append(f"{OPTION}={'='.join([argument, *values])}")
    return marked + remaining


def request_workers(
    requested: RequestedWorkers,
    accelerate_options: list[str] | None,
    variables: dict[str, str],
    torchrun: TorchrunArguments,
    names: Collection[str],
) -> tuple[RequestedWorkers, Callable[..., dict[str, str | None]]]:
    """Return the workers, and a function that returns the variables of the script.

    Accelerate's options for several machines become options of torchrun.

    Args:
        requested: Workers that the options of Drawbar and torchrun request.
        accelerate_options: None if the command line is not Accelerate's.
        variables: Variables of `--env`.
        torchrun: Options of torchrun.
        names: Options of Drawbar and torchrun, which an error may suggest.

    Raises:
        CommandError: An option is unknown, or conflicts with another one.
    """
    has_torchrun_count = bool(requested.nproc_per_node or requested.nnodes)
    if requested.num_workers is not None and has_torchrun_count:
        raise CommandError(
            "--num-workers cannot be combined with --nproc-per-node or --nnodes. Remove one."
        )
    has_num_workers = has_torchrun_count or requested.num_workers is not None
    if accelerate_options is None:
        return requested, partial(make_plain_env, variables, has_num_workers=has_num_workers)
    config = read_accelerate_options(accelerate_options, names, has_num_workers=has_num_workers)
    torchrun.values.update(config.to_torchrun_rendezvous())
    if not has_num_workers:
        nproc_per_node, nnodes = config.to_torchrun()
        requested = dataclasses.replace(requested, nproc_per_node=nproc_per_node, nnodes=nnodes)
    if config.use_cpu:
        requested = dataclasses.replace(requested, use_gpu=bool(requested.use_gpu))
    return requested, partial(make_accelerate_env, config, variables)


def read_accelerate_options(
    options: Sequence[str], names: Collection[str], *, has_num_workers: bool
) -> AccelerateLaunchConfig:
    """Let Accelerate translate its options, and print a warning for each one without effect.

    Args:
        options: Options of Accelerate, each one joined with its value.
        names: As for `request_workers`.
        has_num_workers: Whether an option of Drawbar or torchrun sets the number of processes.

    Raises:
        CommandError: An option is unknown, or conflicts with another one.
    """
    given = [option.partition("=")[0].replace("_", "-") for option in options]
    if has_num_workers and "--num-processes" in given:
        raise CommandError(
            "--num_processes cannot be combined with --num-workers, --nproc-per-node, or --nnodes. "
            "Remove one."
        )
    config = _translate(options, names)
    if config.config_file and "--config-file" not in given:
        _print(f"Using Accelerate's default config file {config.config_file}.")
    if not (has_num_workers or "--num-processes" in given or config.config_file):
        count = config.num_processes
        _print(
            f"Starting {count} {'process' if count == 1 else 'processes'}, one per GPU of this "
            "machine. Set --num_processes to change the number."
            if config.has_accelerator
            else "Starting 1 process. Set --num_processes to start more."
        )
    given += [
        f"--{name.replace('_', '-')}"
        for name, value in config.settings.items()
        if (name, value) != ("main_training_function", "main")  # in each file
    ]
    has_rendezvous = bool(config.to_torchrun_rendezvous())
    for name in dict.fromkeys(_SHORT.get(name, name) for name in given):
        if name in IGNORED and not (has_rendezvous and IGNORED[name] == _RENDEZVOUS):
            _print(f"warning: Ignoring {name}: {IGNORED[name]}")
    os.environ.update(config.device_env)  # before Drawbar counts the GPUs
    return config


def _translate(options: Sequence[str], names: Collection[str]) -> AccelerateLaunchConfig:
    from drawbar.launch import AccelerateLaunchConfig, UnknownAccelerateOptionError

    try:
        return AccelerateLaunchConfig.from_options(options)
    except UnknownAccelerateOptionError as error:
        name = error.option.partition("=")[0].replace("-", "_").replace("__", "--", 1)
        raise CommandError(
            f"Neither drawbar launch nor accelerate launch has the option {name}."
            f"{_suggest(name, [*names, *error.option_names])}"
        ) from error
    except ImportError as error:
        given = [option.partition("=")[0] for option in options]
        suggestions = dict.fromkeys(_suggest(name, names) for name in given)
        raise CommandError(
            f"drawbar launch does not have {', '.join(given)}.{''.join(suggestions)} For the "
            f"options of accelerate launch: {error}"
        ) from error
    except ValueError as error:
        raise CommandError(str(error)) from error


def _suggest(name: str, names: Collection[str]) -> str:
    """Return a question that suggests a similar option, or ""."""
    name = name.replace("_", "-")
    by_text = {other.replace("_", "-"): other for other in names}
    # --nprocs is the name in PyTorch's `spawn()`. It is less similar to --nproc-per-node.
    similar = [text for text in by_text if text.startswith(name.removesuffix("s"))]
    similar += difflib.get_close_matches(name, by_text, n=1)
    return f" Did you mean {by_text[similar[0]]}?" if similar else ""


def make_accelerate_env(
    config: AccelerateLaunchConfig,
    variables: Mapping[str, str],
    scaling: ScalingConfig,
    *,
    uses_ray: bool,
    starts_ray: bool,
) -> dict[str, str | None]:
    """Return the additional variables of the script, and warn about settings without effect.

    Args:
        config: Settings of Accelerate.
        variables: Variables of `--env`, which replace variables of Accelerate.
        scaling: Processes of the run.
        uses_ray: Whether Ray starts the processes.
        starts_ray: Whether this command starts Ray, with the visible devices of this process.

    Raises:
        CommandError: The options name several machines, but there is no Ray cluster.
    """
    if config.num_machines > 1 and not uses_ray:
        raise CommandError(
            f"num_machines={config.num_machines} needs --main_process_ip and --machine_rank on "
            "each machine, or a Ray cluster with --address. On one machine, set --num_machines=1."
        )
    if config.device_env and uses_ray and not starts_ray:
        _print("warning: Ignoring --gpu-ids: Ray assigns the GPUs of each node.")
    if scaling.max_workers == 1 and not config.is_distributed:
        return {**config.env, **dict.fromkeys(_TORCHRUN_VARIABLES), **variables}
    if scaling.use_gpu or (config.has_accelerator and not config.use_cpu):
        return {**config.env, **variables}
    for variable, name in _NEEDS_ACCELERATOR.items():
        if config.env.get(variable) == "true":
            _print(
                f"warning: Ignoring {name}: Accelerate does not use it on CPUs. The processes "
                "train with DistributedDataParallel."
            )
    # Without this variable, each Accelerator() on a machine without GPUs would train alone.
    return {**config.env, "ACCELERATE_USE_CPU": "true", **variables}


def make_plain_env(
    variables: Mapping[str, str], scaling: ScalingConfig, *, has_num_workers: bool, **_: bool
) -> dict[str, str | None]:
    """Return the variables of `--env`. Print a note if a config file of Accelerate is not used.

    Args:
        variables: Variables of `--env`.
        scaling: Processes of the run.
        has_num_workers: Whether an option sets the number of processes.
    """
    path = _default_config_file()
    if not has_num_workers and os.path.isfile(path):
        _print(
            f"Starting {scaling.max_workers} process without Accelerate's {path}. Pass "
            "--accelerate to use it."
        )
    return {**variables}


def _default_config_file() -> str:
    """Return the path of `accelerate.commands.config.default_config_file` without the import."""
    cache = os.environ.get("XDG_CACHE_HOME", "~/.cache")
    home = os.environ.get("HF_HOME", os.path.join(cache, "huggingface"))
    return os.path.join(os.path.expanduser(home), "accelerate", "default_config.yaml")


def _print(text: str) -> None:
    print(f"drawbar: {text}", file=sys.stderr)
