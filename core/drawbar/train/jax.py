"""`drawbar.jax`, under the path that it would have in Ray Train."""

from drawbar.jax import *
