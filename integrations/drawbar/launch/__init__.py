"""Scripts as they are: what torchrun or `accelerate launch` runs, on Ray.

The command `drawbar launch` is made of it.
"""

from drawbar.launch._accelerate import AccelerateLaunchConfig
from drawbar.launch._backend import ScriptConfig
from drawbar.launch._exit_code import exit_code_for
from drawbar.launch._trainer import ScriptTrainer
from drawbar.train.backend import set_public_module

__all__ = ["AccelerateLaunchConfig", "ScriptConfig", "ScriptTrainer", "exit_code_for"]

set_public_module(globals())
