"""Probes, which measure the health of a node, and their results."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar


@dataclass
class ProbeResult:
    """Result of a probe.

    Args:
        metrics: Measurements by name.
        devices: Measurements of each device, such as a GPU, by name.
        events: Texts about what happened since the last call.
        passed: False if the node must not be used, None if the probe does not decide that.
        detail: The evidence in one sentence.

    Example: `ProbeResult(metrics={"temperature": 91.0}, passed=False, detail="91 degrees")`
    """

    metrics: dict[str, float] = field(default_factory=dict)
    devices: dict[str, dict[str, float]] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    passed: bool | None = None
    detail: str = ""


@dataclass(frozen=True)
class NodeContext:
    """Node of a probe.

    Args:
        node_id: Ray's ID of the node.
        hostname: Host of the node.
        storage_path: Path or URI of the run directory.
        is_preflight: True before the workers start, when the probe may use the GPUs.

    Example: `print(context.hostname, context.is_preflight)`
    """

    node_id: str
    hostname: str
    storage_path: str = ""
    is_preflight: bool = False


OnDemandProbeContext = NodeContext
"""Node of an on-demand probe. Ray Train has both names."""


class Probe:
    """Base class of probes. Derive from `NodeProbe` or `OnDemandProbe` instead.

    Example: `isinstance(probe, Probe)`
    """

    name: str = ""
    timeout_s: float = 600.0
    """The probe has failed if there is no result after this time, in seconds. It does not include
    the start of the process that runs the probe, and must be long enough for a busy machine."""

    @property
    def title(self) -> str:
        """Name of the probe in messages."""
        return self.name or type(self).__name__


class NodeProbe(Probe, ABC):
    """Measures the health of a node repeatedly while workers train.

    Example:
        ```python
        class Temperature(NodeProbe):
            def poll(self, ctx):
                return ProbeResult(metrics={"celsius": read_temperature()})
        ```
    """

    interval_s: float = 10.0
    """Seconds between the calls of `poll`."""

    @abstractmethod
    def poll(self, ctx: NodeContext) -> ProbeResult | None:
        """Measure the node. An exception counts as a failed probe.

        Args:
            ctx: The node.

        Returns:
            The result, or None without one.
        """


class OnDemandProbe(Probe, ABC):
    """Checks a node before a start, or when a `Diagnose` requests it.

    Example:
        ```python
        class Driver(OnDemandProbe):
            def poll(self, ctx):
                return ProbeResult(passed=os.path.exists("/dev/nvidiactl"))
        ```
    """

    stop_workers: bool = False
    """True if the probe needs the GPUs. It then runs only before a start."""

    @abstractmethod
    def poll(self, ctx: OnDemandProbeContext) -> ProbeResult:
        """Check the node. An exception counts as a failed probe.

        Args:
            ctx: The node.

        Returns:
            The result.
        """


ProbeT = TypeVar("ProbeT", bound=Probe)


@dataclass
class HealthState:
    """The latest results of all probes, as evaluators read them.

    Args:
        probe_results: Results by type of probe and ID of the node.
        reported: Latest metrics of `health.report()` by rank.
        steps: Latest step of `health.report()` by rank.
        rank_nodes: ID of the node of each rank.
        hostnames: Host of each node, by its ID.

    Example: `state.results(Temperature)[node_id].metrics["celsius"]`
    """

    probe_results: dict[type[Probe], dict[str, ProbeResult]] = field(default_factory=dict)
    reported: dict[int, Mapping[str, object]] = field(default_factory=dict)
    steps: dict[int, int | None] = field(default_factory=dict)
    rank_nodes: dict[int, str] = field(default_factory=dict)
    hostnames: dict[str, str] = field(default_factory=dict)

    def results(self, probe: type[ProbeT]) -> dict[str, ProbeResult]:
        """Return the latest results of a type of probe.

        Args:
            probe: Class of the probe.

        Returns:
            Results by ID of the node.
        """
        return self.probe_results.get(probe, {})

    on_demand_probe_results = results
