"""Read Accelerate config files.

`accelerate launch` translates a config file to environment variables that `Accelerator()` reads.
Accelerate's own code does this in a subprocess, so that this process imports no framework.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass

_PREFIXES = ("ACCELERATE_", "FSDP_", "MEGATRON_LM_", "PARALLELISM_CONFIG_")

_READ_CONFIG_SCRIPT = """
import json, os, sys
output = os.dup(1)
os.dup2(2, 1)  # print warnings of the imports to stderr
from accelerate.commands import launch
from accelerate.utils import launch as prepare

arguments = launch.launch_command_parser().parse_args(["--config_file", sys.argv[1], "script.py"])
arguments, defaults, has_default = launch._validate_launch_command(arguments)
if arguments.use_deepspeed:
    fields = list(defaults.deepspeed_config) + ["mixed_precision"] * bool(has_default)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
    variables = prepare.prepare_deepspeed_cmd_env(arguments)[1]
elif arguments.use_cpu or arguments.cpu:
    variables = prepare.prepare_simple_launcher_cmd_env(arguments)[1]
else:
    variables = prepare.prepare_multi_gpu_env(arguments)
with open(output, "w") as file:
    json.dump({"num_processes": arguments.num_processes, "variables": variables}, file)
"""


@dataclass(frozen=True)
class AccelerateLaunchConfig:
    """Number of processes and environment variables of an Accelerate config file.

    Attributes:
        num_processes: Number of processes on all machines.
        env: Environment variables that `Accelerator()` reads.

    Example:
        ```python
        config = AccelerateLaunchConfig.from_file("accelerate.yaml")
        trainer = ScriptTrainer(
            "train.py",
            environment=config.env,
            scaling_config=ScalingConfig(num_workers=config.num_processes),
        )
        ```
    """

    num_processes: int
    env: dict[str, str]

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> AccelerateLaunchConfig:
        """Read a file that `accelerate config` has written.

        Args:
            path: Path of the config file.

        Returns:
            The config. Variables that this process already has with the same value are omitted.

        Raises:
            FileNotFoundError: The file does not exist.
            ValueError: Accelerate is not installed, or rejects the file.
        """
        if not os.path.isfile(path):
            raise FileNotFoundError(f"No Accelerate config file at {path}.")
        command = [sys.executable, "-c", _READ_CONFIG_SCRIPT, os.fspath(path)]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            error_lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
            raise ValueError(f"Accelerate rejected {os.fspath(path)}: {error_lines[-1]}")
        config = json.loads(process.stdout)
        variables = {
            name: value
            for name, value in config["variables"].items()
            if name.startswith(_PREFIXES) and os.environ.get(name) != value
        }
        return cls(int(config["num_processes"]), variables)
