"""Keras 3 model.fit on Ray, with the torch, jax, or tensorflow backend.

Importing this package imports neither Keras nor a backend. The trainer selects the backend.
"""

from drawbar.keras._backend import KerasConfig
from drawbar.keras._data import prepare_dataset
from drawbar.keras._prepare import prepare_model
from drawbar.keras._report_callback import ReportCheckpointCallback
from drawbar.keras._state import load_state
from drawbar.keras._trainer import KerasTrainer
from drawbar.train.backend import set_public_module

__all__ = [
    "KerasConfig",
    "KerasTrainer",
    "ReportCheckpointCallback",
    "load_state",
    "prepare_dataset",
    "prepare_model",
]

set_public_module(globals())
