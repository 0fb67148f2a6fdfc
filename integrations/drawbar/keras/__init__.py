"""`model.fit` of Keras 3 on a group of Ray actors, with whichever backend Keras has.

Importing this imports neither Keras nor a backend: a trainer says which one the workers use.
"""

from drawbar.keras._backend import KerasConfig
from drawbar.keras._data import prepare_dataset
from drawbar.keras._prepare import load_state, prepare_model
from drawbar.keras._report_callback import ReportCheckpointCallback
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
