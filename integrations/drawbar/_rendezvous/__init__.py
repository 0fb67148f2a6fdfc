"""Where workers meet: ports that stay free until a framework binds them.

The integrations share it. Users do not import it.
"""

from drawbar._rendezvous._ports import held_port, reserved_port
from drawbar.train.backend import set_public_module

__all__ = ["held_port", "reserved_port"]

set_public_module(globals())
