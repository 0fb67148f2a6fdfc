"""`HealthConfig`: which probes and evaluators a run has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated

from drawbar._base import fields
from drawbar._health.decisions import Evaluator, HealthDecision
from drawbar._health.probes import Probe

__all__ = ["HealthConfig", "HealthDecision", "HealthPolicy"]

ProbeCreator = Callable[[], Sequence[Probe]]
EvaluatorsCreator = Callable[[], Sequence[Evaluator]]


def _check_creator(name: str, value: object) -> object:
    if not callable(value):
        raise TypeError(
            f"{name} must be a function without arguments that returns a list, found {value!r}. "
            f"Write {name}=lambda: [...]"
        )
    return value


@dataclass(frozen=True, repr=False)
class HealthPolicy(fields.ConfigRepr):
    """Probes, and the evaluators that judge their results.

    Args:
        probe_creator: Function that returns the probes. Default: no probes.
        evaluators_creator: Function that returns the evaluators, which is called once per run.
            Default: a `FailedProbeEvaluator`, which evicts nodes whose probes have failed.
        preflight: Whether the probes also run before the workers start, on each node that may have
            workers. On-demand probes run only then, or if a `Diagnose` requests them.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: `preflight` is set without a `probe_creator`.

    Example: `HealthPolicy(probe_creator=builtin_probes, preflight=True)`
    """

    probe_creator: Annotated[ProbeCreator | None, _check_creator] = None
    evaluators_creator: Annotated[EvaluatorsCreator | None, _check_creator] = None
    preflight: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.preflight and self.probe_creator is None:
            raise ValueError(
                "HealthPolicy(preflight=True) needs a probe_creator, found None. Set it, for "
                "example to health.builtin_probes."
            )


@dataclass(frozen=True, repr=False)
class HealthConfig(fields.ConfigRepr):
    """Health checks of a run on Ray, before it starts and while it trains.

    Args:
        policies: The checks. All decisions are compared, and the most severe one is taken.

    Raises:
        TypeError: `policies` is no list of `HealthPolicy`.

    Example: `HealthConfig(policies=[HealthPolicy(probe_creator=builtin_probes, preflight=True)])`
    """

    policies: Annotated[
        Sequence[HealthPolicy], fields.list_of(HealthPolicy, "a list of HealthPolicy")
    ] = field(default_factory=list)
