"""Scripts as they are: what torchrun or `accelerate launch` runs, on Ray.

The command `drawbar launch` is made of it.
"""

from drawbar.launch._accelerate import AccelerateSettings
from drawbar.launch._backend import ScriptConfig
from drawbar.launch._exit_code import exit_code_of
from drawbar.launch._trainer import ScriptTrainer
from drawbar.train.backend import set_public_module

__all__ = ["AccelerateSettings", "ScriptConfig", "ScriptTrainer", "exit_code_of"]

set_public_module(globals())
