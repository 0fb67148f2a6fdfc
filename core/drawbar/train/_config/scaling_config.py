"""`ScalingConfig`: number of workers and resources of each worker."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Annotated, Any, Literal

from drawbar._base.fields import ConfigRepr, require_int, require_type
from drawbar._base.frames import warn_caller
from drawbar._base.node_resources import exclude_node

TOPOLOGY_LABEL = "ray.io/tpu-topology"
"""Ray's node label for the topology of a TPU slice, such as "2x2x2"."""

PlacementStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

_RAY_RESOURCE_NAMES = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU", "memory": "memory"}


def _check_num_workers(name: str, value: Any) -> int | tuple[int, int]:
    if not isinstance(value, tuple | list):
        return require_int(name, value, at_least=0)
    if len(value) != 2:
        raise ValueError(
            f"{name} must be an int, or (low, high) for an elastic group, found {value!r}"
        )
    # Accept lists: configurations that are read from YAML or JSON have no tuples.
    low, high = value
    require_int(f"{name}[0]", low, at_least=1)
    require_int(f"{name}[1]", high, at_least=low)
    return low, high


def _check_resources(name: str, value: Any) -> Mapping[str, float]:
    for key, amount in require_type(name, value, Mapping).items():
        require_type(f"{name}: a key", key, str)
        entry = f"{name}[{key!r}]"
        if key != (meant := _RAY_RESOURCE_NAMES.get(key.lower(), key)):
            raise ValueError(f"{entry} is not a Ray resource; write {meant!r}")
        if isinstance(amount, bool) or not isinstance(amount, int | float):
            raise TypeError(f"{entry} must be a number, found {amount!r}")
        if not 0 <= amount < math.inf:
            raise ValueError(f"{entry} must be finite and not negative, found {amount!r}")
    resources: Mapping[str, float] = value
    return resources


def _check_label_selector(name: str, value: Any) -> Any:
    is_list = isinstance(value, Sequence) and not isinstance(value, str)
    selectors = value if is_list else [value]
    if not all(isinstance(selector, Mapping) for selector in selectors):
        raise TypeError(
            f"{name} must be a mapping, or a list with one mapping per worker, found {value!r}"
        )
    if not all(isinstance(v, str) for selector in selectors for v in selector.values()):
        raise TypeError(f"{name} must have strings as values, found {value!r}")
    return value


@dataclass(frozen=True, repr=False)
class ScalingConfig(ConfigRepr):
    """Number of workers and resources of each worker.

    Args:
        trainer_resources: Accepted for compatibility with Ray Train. Must be None, since only
            workers reserve resources.
        num_workers: Number of worker processes; each one is a Ray actor. 0 runs the training
            function in the current process, for example to use `pdb`, with the same reports,
            checkpoints, and `Result`. (low, high) makes the run elastic: it starts with as many
            workers as fit, continues with fewer when workers are lost, and adds workers when a
            checkpoint is committed.
        use_gpu: Whether each worker uses a GPU. The default is one GPU;
            `resources_per_worker["GPU"]` sets another number.
        resources_per_worker: Ray resources of one worker, such as `{"CPU": 4, "GPU": 1}`. `memory`
            is in bytes; other keys are custom resources. Default: `{"CPU": 1}`, or `{"GPU": 1}`
            with `use_gpu`.
        placement_strategy: Ray's placement group strategy: "PACK" (as few nodes as possible),
            "SPREAD", "STRICT_PACK" (one node or fail), or "STRICT_SPREAD" (one worker per node or
            fail).
        accelerator_type: Accelerator that a worker's node must have, such as "A100"
            (`ray.util.accelerators`).
        label_selector: Ray node labels that a worker's node must have: one mapping for all workers,
            or a list with one mapping per worker.
        use_tpu: Whether each worker uses TPUs. The default is one TPU;
            `resources_per_worker["TPU"]` sets another number.
        topology: Topology of a TPU slice, such as "2x2x2". Requires `use_tpu` and
            `accelerator_type`. Workers run on nodes of slices with this topology, by
            default one worker per host with all of its chips. If the cluster has several slices,
            select one with `label_selector={"ray.io/tpu-slice-name": ...}`.
        elastic_resize_monitor_interval_s: Accepted for compatibility with Ray Train and ignored
            with a warning. Elastic runs are resized when a checkpoint is committed.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument is out of range or conflicts with another argument.

    Example:
        >>> ScalingConfig(num_workers=8, use_gpu=True)
        ScalingConfig(num_workers=8, use_gpu=True)
        >>> ScalingConfig(num_workers=(2, 8), resources_per_worker={"CPU": 4})  # elastic
        ScalingConfig(num_workers=(2, 8), resources_per_worker={'CPU': 4})
    """

    trainer_resources: InitVar[None] = None
    num_workers: Annotated[int | tuple[int, int], _check_num_workers] = 1
    use_gpu: bool = False
    resources_per_worker: Annotated[Mapping[str, float] | None, _check_resources] = None
    placement_strategy: PlacementStrategy = "PACK"
    accelerator_type: str | None = None
    label_selector: Annotated[
        Mapping[str, str] | Sequence[Mapping[str, str]] | None, _check_label_selector
    ] = None
    use_tpu: bool = False
    topology: str | None = None
    elastic_resize_monitor_interval_s: InitVar[float | None] = None

    def __post_init__(
        self,
        trainer_resources: None,
        elastic_resize_monitor_interval_s: float | None,
    ) -> None:
        _check_ignored_arguments(trainer_resources, elastic_resize_monitor_interval_s)
        super().__post_init__()
        if self.use_gpu and self.use_tpu:
            raise ValueError(
                "ScalingConfig has use_gpu=True and use_tpu=True, but a worker uses one kind of "
                "accelerator; set one of them to False"
            )
        for accelerator, is_used in (("GPU", self.use_gpu), ("TPU", self.use_tpu)):
            _check_accelerator(accelerator, is_used, self.resources_per_worker or {})
        self._check_label_count()
        self._check_topology()

    def _check_label_count(self) -> None:
        selector = self.label_selector
        if selector is None or isinstance(selector, Mapping):
            return
        if len(selector) != self.max_workers:
            raise ValueError(
                f"ScalingConfig.label_selector lists {len(selector)} selectors for "
                f"num_workers={self.num_workers}; give one per worker, or one mapping for all"
            )

    def _check_topology(self) -> None:
        if self.topology is None:
            if self.use_tpu and self.max_workers > 1 and not self.label_selector:
                raise ValueError(
                    f"ScalingConfig has use_tpu=True and num_workers={self.num_workers}, so all "
                    "TPUs must be in one slice. Set topology= and accelerator_type=, such as "
                    'topology="2x2x2", accelerator_type="TPU-V4", or name the slice with '
                    'label_selector={"ray.io/tpu-slice-name": ...}'
                )
            return
        if not self.use_tpu or self.accelerator_type is None:
            missing = "accelerator_type=" if self.use_tpu else "use_tpu=True"
            raise ValueError(
                f"ScalingConfig.topology={self.topology!r} describes a TPU slice; set {missing} too"
            )
        slice_workers, _ = compute_slice_workers(
            self.topology, self.accelerator_type, self.resources_per_worker
        )
        if self.max_workers % slice_workers or self.min_workers % slice_workers:
            raise ValueError(
                f"ScalingConfig has num_workers={self.num_workers}, but a slice of topology "
                f"{self.topology!r} has {slice_workers} workers; set a multiple of {slice_workers}"
            )

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one worker, with defaults and without zero entries."""
        resources = dict(self.resources_per_worker or {})
        if self.use_gpu:
            resources.setdefault("GPU", 1)
        elif self.use_tpu:
            resources.setdefault("TPU", self._chips_per_worker)
        elif self.resources_per_worker is None:
            resources["CPU"] = 1
        if self.accelerator_type:
            # As Ray does: a small amount of a resource that only nodes with this accelerator have.
            resources[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return {key: float(amount) for key, amount in resources.items() if amount}

    @property
    def _chips_per_worker(self) -> float:
        if self.topology is None or self.accelerator_type is None:
            return 1
        return compute_slice_workers(self.topology, self.accelerator_type, None)[1]

    @property
    def total_resources(self) -> dict[str, float]:
        """Resources of all workers together, for the maximum number of workers."""
        return {key: amount * max(self.max_workers, 1) for key, amount in self.bundle.items()}

    @property
    def elasticity_enabled(self) -> bool:
        """True if the number of workers may change during the run."""
        return isinstance(self.num_workers, tuple)

    @property
    def min_workers(self) -> int:
        """Minimum number of workers with which the run continues."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """Maximum number of workers."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def label_selectors(self) -> list[dict[str, str]]:
        """Label selectors, one per worker; empty if there are none."""
        selector = self.label_selector or {}
        slice_labels = {} if self.topology is None else {TOPOLOGY_LABEL: self.topology}
        if not (slice_labels or selector):
            return []
        selectors = [selector] * self.max_workers if isinstance(selector, Mapping) else selector
        return [
            # Ray reads "in(a, b)" as the values "a" and " b".
            {**slice_labels, **{key: value.replace(" ", "") for key, value in labels.items()}}
            for labels in selectors
        ]

    def exclude_node(self, node_id: str) -> ScalingConfig:
        """Return a copy whose workers do not run on a node.

        Returns this configuration if its labels select nodes by their ID.
        """
        selectors = exclude_node(self.label_selectors or [{}] * self.max_workers, node_id)
        return dataclasses.replace(self, label_selector=selectors)

    @property
    def num_cpus_per_worker(self) -> float:
        """Number of CPUs of one worker."""
        return self.bundle.get("CPU", 0.0)

    @property
    def num_gpus_per_worker(self) -> float:
        """Number of GPUs of one worker."""
        return self.bundle.get("GPU", 0.0)

    @property
    def num_tpus_per_worker(self) -> float:
        """Number of TPUs of one worker."""
        return self.bundle.get("TPU", 0.0)

    @property
    def additional_resources_per_worker(self) -> dict[str, float]:
        """Resources of one worker other than CPUs, GPUs, and TPUs."""
        return {key: n for key, n in self.bundle.items() if key not in ("CPU", "GPU", "TPU")}


def _check_ignored_arguments(
    trainer_resources: object, elastic_resize_monitor_interval_s: object
) -> None:
    """Check arguments that are accepted only for compatibility with Ray Train."""
    if trainer_resources is not None:
        raise ValueError(
            f"ScalingConfig.trainer_resources must be None, found {trainer_resources!r}: only "
            "workers reserve resources. Did you mean num_workers= or resources_per_worker=?"
        )
    if elastic_resize_monitor_interval_s is not None:
        warn_caller(
            "ScalingConfig.elastic_resize_monitor_interval_s has no effect: an elastic run adds "
            "workers whenever a checkpoint is committed"
        )


def _check_accelerator(name: str, is_used: bool, resources: Mapping[str, float]) -> None:
    amount, option = resources.get(name, 0), f"use_{name.lower()}"
    if is_used and name in resources and not amount:
        raise ValueError(
            f"ScalingConfig has {option}=True and resources_per_worker[{name!r}]=0; "
            f"set {option}=False or request a {name}"
        )
    if amount and not is_used:
        raise ValueError(
            f"ScalingConfig has resources_per_worker[{name!r}]={amount} and {option}=False; "
            f"set {option}=True so that the workers use their {name}s"
        )


def compute_slice_workers(
    topology: str, accelerator_type: str, resources: Mapping[str, float] | None
) -> tuple[int, float]:
    """Return the number of workers of a slice and the number of chips of each worker.

    Args:
        topology: Topology such as "2x2x2".
        accelerator_type: Accelerator such as "TPU-V4".
        resources: Resources of one worker, if set. Without "TPU", a worker gets all chips of a
            host.

    Raises:
        ValueError: The slice does not exist, or workers cannot divide it evenly.
        ImportError: Ray is older than 2.54.
    """
    try:
        from ray.util.tpu import get_tpu_worker_resources
    except ImportError as error:
        raise ImportError(
            f"ScalingConfig(topology={topology!r}) needs Ray 2.54 or later, found "
            f"{importlib.metadata.version('ray')}. Run: pip install --upgrade ray"
        ) from error

    try:
        num_workers, worker_resources = get_tpu_worker_resources(
            topology, accelerator_type, dict(resources or {})
        )
    except (AssertionError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"ScalingConfig has topology={topology!r} and accelerator_type={accelerator_type!r}, "
            f"which is no TPU slice that workers can divide: {error}. "
            'Set, for example, topology="2x2x2" and accelerator_type="TPU-V4"'
        ) from error
    return num_workers, worker_resources["TPU"]
