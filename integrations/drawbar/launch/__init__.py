"""Run unchanged training scripts on Ray, like torchrun or `accelerate launch`.

The command `drawbar launch` uses this package.
"""

from drawbar.launch._accelerate import AccelerateLaunchConfig
from drawbar.launch._backend import ScriptConfig
from drawbar.launch._exit_code import exit_code_for
from drawbar.launch._trainer import ScriptTrainer
from drawbar.train.backend import set_public_module

__all__ = ["AccelerateLaunchConfig", "ScriptConfig", "ScriptTrainer", "exit_code_for"]

set_public_module(globals())
