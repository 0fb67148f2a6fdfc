"""Check the nodes of a run before it starts and while it trains. Ray Train has the same names.

Example:
    Do not start on nodes with wrong arithmetic or little space on the disk:

        from drawbar.train import RunConfig, health

        policy = health.HealthPolicy(probe_creator=health.builtin_probes, preflight=True)
        run_config = RunConfig(health_config=health.HealthConfig(policies=[policy]))
"""

from drawbar._base.api import set_public_module
from drawbar._health_manager import api
from drawbar._health_manager.api import *

__all__ = api.__all__

set_public_module(globals())
