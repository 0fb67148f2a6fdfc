"""Run unchanged training scripts like torchrun or `accelerate launch`, with or without Ray.

The command `drawbar launch` uses this package.
"""

from drawbar.launch._accelerate import AccelerateLaunchConfig, UnknownAccelerateOptionError
from drawbar.launch._backend import ScriptConfig
from drawbar.launch._error_file import write_error_file
from drawbar.launch._exit_code import exit_code_for
from drawbar.launch._torchrun_options import TorchrunOptions
from drawbar.launch._trainer import ScriptTrainer
from drawbar.train.backend import set_public_module

__all__ = [
    "AccelerateLaunchConfig",
    "ScriptConfig",
    "ScriptTrainer",
    "TorchrunOptions",
    "UnknownAccelerateOptionError",
    "exit_code_for",
    "write_error_file",
]

set_public_module(globals())
