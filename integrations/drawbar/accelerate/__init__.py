"""Hugging Face Accelerate on a group of Ray actors.

An `Accelerator()` made in the function of a `drawbar.torch.TorchTrainer` has its rank, its device
and the process group from Drawbar, without any of what is here.
"""

from drawbar.accelerate._launcher import launch
from drawbar.accelerate._prepare import check_accelerator, load_state
from drawbar.accelerate._report import report_state
from drawbar.train.backend import set_public_module

__all__ = ["check_accelerator", "launch", "load_state", "report_state"]

set_public_module(globals())
