"""Read options and config files of `accelerate launch` with private functions of Accelerate.

Accelerate 1.0 to 1.15 have these functions. `_accelerate.py` runs this file in a subprocess, so
that the process of `drawbar launch` imports no framework. If Accelerate changes the functions, the
subprocess fails, and `AccelerateLaunchConfig` raises an error with the last line of its output.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from accelerate.commands import launch
from accelerate.commands.config.config_args import (
    SageMakerConfig,
    default_config_file,
    load_config_from_file,
)
from accelerate.utils import check_cuda_p2p_ib_support
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

_RENDEZVOUS_VARIABLES = frozenset({"MASTER_ADDR", "MASTER_PORT"})
_UNSAFE_NCCL = ("NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")


class UnsupportedError(ValueError):
    """Options that only `accelerate launch` itself supports."""


def read_options(options: Sequence[str]) -> dict[str, Any]:
    """Return the settings that `accelerate launch` derives from its options and config file.

    Args:
        options: Options of `accelerate launch`, without a script.

    Returns:
        Attributes of `AccelerateLaunchConfig`, or the `unknown_options` and all `option_names`.

    Raises:
        UnsupportedError: The options need another launcher.
        ValueError: Accelerate rejects the options.
    """
    parser = launch.launch_command_parser()
    arguments, unknown = parser.parse_known_args([*options, "script.py"])
    if unknown:
        names = [f"--{name}" for name in vars(arguments)]
        return {"unknown_options": unknown, "option_names": names}
    config_file = _find_config_file(arguments)
    if config_file and isinstance(load_config_from_file(config_file), SageMakerConfig):
        raise UnsupportedError(
            f"{config_file} is for Amazon SageMaker, which drawbar launch does not support. Use "
            "'accelerate launch'."
        )
    has_num_processes = arguments.num_processes is not None
    arguments, config, is_precision_from_file = launch._validate_launch_command(arguments)
    if arguments.tpu or arguments.tpu_use_cluster:
        raise UnsupportedError(
            "drawbar launch does not support TPUs. Use 'accelerate launch', or drawbar.jax."
        )
    changed = {
        name: value for name, value in vars(arguments).items() if value != parser.get_default(name)
    }
    num_machines = int(arguments.num_machines or 1)
    if arguments.use_deepspeed and not arguments.cpu:
        fields = list(config.deepspeed_config) if config else []
        fields += ["mixed_precision"] * bool(is_precision_from_file)
        arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
    env, is_distributed = _make_env(arguments)
    num_processes = arguments.num_processes or 1
    if config and config.distributed_type == "NO" and not is_distributed and not has_num_processes:
        num_processes = 1
    return {
        "num_processes": num_processes,
        "num_machines": num_machines,
        "is_distributed": is_distributed or num_processes > 1,
        "config_file": config_file,
        "use_cpu": bool(arguments.cpu or arguments.use_cpu),
        "has_accelerator": _has_accelerator(),
        "settings": {name: value for name, value in changed.items() if _is_plain(value)},
        **_split_env(env, os.environ, arguments.gpu_ids),
    }


def _find_config_file(arguments: argparse.Namespace) -> str | None:
    """Return the config file that `accelerate launch` reads."""
    if arguments.config_file is not None:
        return str(arguments.config_file)
    has_default = os.path.isfile(default_config_file) and not arguments.cpu
    return str(default_config_file) if has_default else None


def _make_env(arguments: argparse.Namespace) -> tuple[dict[str, str], bool]:
    """Return the environment, and whether Accelerate starts the script with torchrun."""
    # Drawbar starts the processes of all machines, and sets the rendezvous address.
    arguments.num_machines, arguments.machine_rank = 1, 0
    arguments.main_process_ip, arguments.main_process_port = None, 0
    arguments.mpirun_hostfile = None
    if arguments.cpu or not (
        arguments.use_deepspeed
        or arguments.use_fsdp
        or arguments.use_megatron_lm
        or arguments.multi_gpu
    ):
        return prepare_simple_launcher_cmd_env(arguments)[1], False
    if arguments.use_deepspeed:
        env: dict[str, str] = prepare_deepspeed_cmd_env(arguments)[1]
    else:
        env = prepare_multi_gpu_env(arguments)
    if not check_cuda_p2p_ib_support():
        env = dict.fromkeys(_UNSAFE_NCCL, "1") | env
    return env, True


def _split_env(
    env: Mapping[str, str], current: Mapping[str, str], gpu_ids: str | None
) -> dict[str, dict[str, str]]:
    """Return the variables that Accelerate has set, separated into devices and others."""
    changed = {
        name: value
        for name, value in env.items()
        if current.get(name) != value and name not in _RENDEZVOUS_VARIABLES
    }
    devices = {
        name: value
        for name, value in changed.items()
        if value == gpu_ids and ("VISIBLE" in name or name == "ZE_AFFINITY_MASK")
    }
    others = {name: value for name, value in changed.items() if name not in devices}
    return {"env": others, "device_env": devices}


def _has_accelerator() -> bool:
    accelerator = getattr(torch, "accelerator", torch.cuda)  # torch < 2.6 has no torch.accelerator
    return bool(accelerator.is_available())


def _is_plain(value: object) -> bool:
    return isinstance(value, str | int | float) and bool(value)


def main() -> None:
    """Print the settings of the options in the command line as JSON."""
    output = os.dup(1)
    os.dup2(2, 1)  # print warnings of Accelerate to standard error
    try:
        settings = read_options(sys.argv[1:])
    except UnsupportedError as error:
        settings = {"unsupported": str(error)}
    with open(output, "w") as file:
        json.dump(settings, file)


if __name__ == "__main__":
    main()
