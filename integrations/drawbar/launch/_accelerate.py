"""What `accelerate launch` makes of a configuration file: variables that `Accelerator()` reads.

Accelerate itself is asked, in a process of its own: this one imports no framework.
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
answer = os.dup(1)
os.dup2(2, 1)  # whatever is printed on the way
from accelerate.commands import launch
from accelerate.utils import launch as prepare

arguments = launch.launch_command_parser().parse_args(["--config_file", sys.argv[1], "script.py"])
arguments, defaults, by_file = launch._validate_launch_command(arguments)
if arguments.use_deepspeed:
    fields = list(defaults.deepspeed_config) + ["mixed_precision"] * bool(by_file)
    arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)
    variables = prepare.prepare_deepspeed_cmd_env(arguments)[1]
elif arguments.use_cpu or arguments.cpu:
    variables = prepare.prepare_simple_launcher_cmd_env(arguments)[1]
else:
    variables = prepare.prepare_multi_gpu_env(arguments)
with open(answer, "w") as file:
    json.dump({"num_processes": arguments.num_processes, "variables": variables}, file)
"""


@dataclass(frozen=True)
class AccelerateLaunchConfig:
    """What a configuration file of Accelerate's says.

    Attributes:
        num_processes: Of all machines.
        variables: What `Accelerator()` reads from its environment.
    """

    num_processes: int
    env: dict[str, str]

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> AccelerateLaunchConfig:
        """Have Accelerate read a file that `accelerate config` has written.

        Raises:
            FileNotFoundError: There is none.
            ValueError: Accelerate is not installed, or does not take the file; the message has its
                words.
        """
        if not os.path.isfile(path):
            raise FileNotFoundError(f"there is no configuration of Accelerate at {path}")
        command = [sys.executable, "-c", _READ_CONFIG_SCRIPT, os.fspath(path)]
        process = subprocess.run(command, capture_output=True, text=True)
        if process.returncode:
            error_lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
            raise ValueError(f"Accelerate does not take {os.fspath(path)}: {error_lines[-1]}")
        config = json.loads(process.stdout)
        variables = {
            name: value
            for name, value in config["variables"].items()
            if name.startswith(_PREFIXES) and os.environ.get(name) != value
        }
        return cls(int(config["num_processes"]), variables)
