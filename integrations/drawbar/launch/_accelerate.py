"""Read options and config files of `accelerate launch`.

`accelerate launch` translates them to environment variables that `Accelerator()` reads. Code of
Accelerate does this in a subprocess, so that this process imports no framework.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec

from drawbar.train.backend import make_import_error

_READER = os.path.join(os.path.dirname(__file__), "_compat.py")


class UnknownAccelerateOptionError(ValueError):
    """An option that `accelerate launch` does not have.

    Attributes:
        option: The option.
        option_names: All options of the installed version.

    Example:
        >>> raise UnknownAccelerateOptionError("--num_proces", ["--num_processes"])
        Traceback (most recent call last):
        drawbar.launch.UnknownAccelerateOptionError: accelerate launch has no option --num_proces.
    """

    def __init__(self, option: str, option_names: Sequence[str]) -> None:
        super().__init__(f"accelerate launch has no option {option}.")
        self.option = option
        self.option_names = option_names


@dataclass(frozen=True)
class AccelerateLaunchConfig:
    """Processes and environment variables that `accelerate launch` derives from its options.

    Attributes:
        num_processes: Number of processes on all machines.
        env: Environment variables that `Accelerator()` and its libraries read.
        num_machines: Number of machines.
        is_distributed: Whether the script gets ranks and a rendezvous address. If not, it runs as
            with `python`.
        use_cpu: Whether the options or the config file request training on CPUs.
        has_accelerator: Whether PyTorch finds a GPU or another accelerator on this machine.
        device_env: Variables that limit the visible devices, from `--gpu_ids`.
        config_file: Config file that was read, which may be Accelerate's default file.
        settings: Settings that differ from Accelerate's defaults, by the names of the options.

    Example:
        ```python
        config = AccelerateLaunchConfig.from_options(["--mixed_precision=bf16", "--use_fsdp"])
        trainer = ScriptTrainer(
            "train.py",
            environment=config.env,
            scaling_config=ScalingConfig(num_workers=config.num_processes),
        )
        ```
    """

    num_processes: int
    env: dict[str, str]
    num_machines: int = 1
    is_distributed: bool = True
    use_cpu: bool = False
    has_accelerator: bool = False
    device_env: Mapping[str, str] = field(default_factory=dict)
    config_file: str | None = None
    settings: Mapping[str, str | int | float] = field(default_factory=dict)

    def to_torchrun(self) -> tuple[str, str]:
        """Return the values of `--nproc-per-node` and `--nnodes` for the same processes."""
        return str(self.num_processes // self.num_machines or 1), str(self.num_machines)

    def to_torchrun_rendezvous(self) -> dict[str, str]:
        """Return options of torchrun for commands on several machines; without them, nothing."""
        host, rank = (self.settings.get(name) for name in ("main_process_ip", "machine_rank"))
        if self.num_machines == 1 or not (host or rank):
            return {}
        port = self.settings.get("main_process_port") or 29500
        return {"--rdzv-endpoint": f"{host or '127.0.0.1'}:{port}", "--node-rank": str(rank or 0)}

    @classmethod
    def from_file(cls, path: str | os.PathLike[str]) -> AccelerateLaunchConfig:
        """Read a file that `accelerate config` has written.

        Args:
            path: Path of the config file.

        Returns:
            The config. Variables that this process already has with the same value are omitted.

        Raises:
            FileNotFoundError: The file does not exist.
            ImportError: Accelerate is not installed.
            ValueError: Accelerate rejects the file.
        """
        if not os.path.isfile(path):
            raise FileNotFoundError(f"No Accelerate config file at {path}.")
        return cls.from_options([f"--config_file={os.fspath(path)}"])

    @classmethod
    def from_options(cls, options: Sequence[str]) -> AccelerateLaunchConfig:
        """Read options of `accelerate launch`.

        Without `--config_file` and `--cpu`, this function also reads Accelerate's default config
        file, if it exists.

        Args:
            options: Options before the script. Each value is joined with its option, as in
                `--num_processes=2`.

        Returns:
            The config. Variables that this process already has with the same value are omitted.

        Raises:
            ImportError: Accelerate is not installed.
            UnknownAccelerateOptionError: Accelerate does not have an option.
            ValueError: Accelerate rejects the options or the config file, or they are for TPUs or
                Amazon SageMaker.
        """
        if find_spec("accelerate") is None:
            raise make_import_error("accelerate", extra="accelerate")
        # -P: the modules in the directory of the file must not replace others.
        command = [sys.executable, "-P", _READER, *options]
        process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if process.returncode:
            error_lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
            reason = re.sub(r"^([\w.]*Error|.* command: error): ", "", error_lines[-1])
            raise ValueError(f"Accelerate rejected {' '.join(options)}: {reason}")
        config = json.loads(process.stdout.splitlines()[-1])
        if unsupported := config.get("unsupported"):
            raise ValueError(unsupported)
        if unknown := config.get("unknown_options"):
            raise UnknownAccelerateOptionError(unknown[0], config["option_names"])
        return cls(**config)
