"""Ports that stay free until a framework binds them. Shared by the integrations."""

from drawbar._rendezvous._ports import held_port, reserved_port
from drawbar.train.backend import set_public_module

__all__ = ["held_port", "reserved_port"]

set_public_module(globals())
