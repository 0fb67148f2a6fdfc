"""Check the nodes of a run before it starts and while it trains. Ray Train has the same names.

Example:
    Do not start on nodes with wrong arithmetic or little space on the disk:

        from drawbar.train import RunConfig, health

        policy = health.HealthPolicy(probe_creator=health.builtin_probes, preflight=True)
        run_config = RunConfig(health_config=health.HealthConfig(policies=[policy]))
"""

from drawbar._base.api import set_public_module
from drawbar._health.decisions import (
    Action,
    Cause,
    Diagnose,
    Evaluator,
    Evict,
    HealthDecision,
    Noop,
    Reattempt,
)
from drawbar._health.health_config import HealthConfig, HealthPolicy
from drawbar._health.probes import (
    HealthState,
    NodeContext,
    NodeProbe,
    OnDemandProbe,
    OnDemandProbeContext,
    Probe,
    ProbeResult,
)
from drawbar._health_manager.all_reduce import AllReducePeer
from drawbar._health_manager.builtin_probes import (
    AllReduceProbe,
    ArithmeticProbe,
    ClockProbe,
    DiskProbe,
    MemoryProbe,
    builtin_probes,
)
from drawbar._health_manager.evaluation import FailedProbeEvaluator
from drawbar._health_manager.report import report

__all__ = [
    "Action",
    "AllReducePeer",
    "AllReduceProbe",
    "ArithmeticProbe",
    "Cause",
    "ClockProbe",
    "Diagnose",
    "DiskProbe",
    "Evaluator",
    "Evict",
    "FailedProbeEvaluator",
    "HealthConfig",
    "HealthDecision",
    "HealthPolicy",
    "HealthState",
    "MemoryProbe",
    "NodeContext",
    "NodeProbe",
    "Noop",
    "OnDemandProbe",
    "OnDemandProbeContext",
    "Probe",
    "ProbeResult",
    "Reattempt",
    "builtin_probes",
    "report",
]

set_public_module(globals())
