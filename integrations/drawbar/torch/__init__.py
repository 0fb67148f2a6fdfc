"""PyTorch training on Ray: trainer, process group, and training-function helpers."""

from drawbar.torch._async_state import load_state, save_async
from drawbar.torch._attempt_cleanup import on_attempt_end
from drawbar.torch._backend import TorchBackend, TorchConfig
from drawbar.torch._checkpoint import TorchCheckpoint
from drawbar.torch._data_loader import prepare_data_loader
from drawbar.torch._devices import get_device, get_devices
from drawbar.torch._mixed_precision import accelerate, backward, prepare_optimizer
from drawbar.torch._prepare import prepare_model
from drawbar.torch._reproducibility import enable_reproducibility
from drawbar.torch._torchft import TorchftConfig
from drawbar.torch._trainer import TorchTrainer
from drawbar.torch._xla import TorchXLAConfig
from drawbar.train.backend import set_public_module

__all__ = [
    "TorchBackend",
    "TorchCheckpoint",
    "TorchConfig",
    "TorchTrainer",
    "TorchXLAConfig",
    "TorchftConfig",
    "accelerate",
    "backward",
    "enable_reproducibility",
    "get_device",
    "get_devices",
    "load_state",
    "on_attempt_end",
    "prepare_data_loader",
    "prepare_model",
    "prepare_optimizer",
    "save_async",
]

set_public_module(globals())
