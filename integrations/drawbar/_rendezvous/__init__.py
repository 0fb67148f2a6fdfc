"""Where workers meet: ports that stay free until a framework binds them.

The integrations share it. Users do not import it.
"""

from drawbar._rendezvous._ports import held_port, reserved_port
from drawbar.train.backend import as_public

__all__ = ["held_port", "reserved_port"]

as_public(globals())
