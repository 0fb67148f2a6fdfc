"""JAX training on Ray, with one global mesh over all workers."""

from drawbar.jax._backend import JaxBackend, JaxConfig
from drawbar.jax._state import load_state, report_state
from drawbar.jax._trainer import JaxTrainer
from drawbar.train.backend import set_public_module

__all__ = ["JaxBackend", "JaxConfig", "JaxTrainer", "load_state", "report_state"]

set_public_module(globals())
