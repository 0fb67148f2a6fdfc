"""Hugging Face Accelerate on Ray.

An `Accelerator()` in the training function of a `drawbar.torch.TorchTrainer` gets its rank, device,
and process group from Drawbar. It does not need this package.
"""

from drawbar.accelerate._global_batch import set_global_batch_size
from drawbar.accelerate._launcher import launch
from drawbar.accelerate._prepare import check_accelerator
from drawbar.accelerate._state import load_state, report_state
from drawbar.train.backend import set_public_module

__all__ = ["check_accelerator", "launch", "load_state", "report_state", "set_global_batch_size"]

set_public_module(globals())
