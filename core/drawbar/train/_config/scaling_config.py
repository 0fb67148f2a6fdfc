"""`ScalingConfig`: how many workers, on what."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import InitVar, dataclass
from typing import Literal, get_args

from drawbar.train._config.checks import (
    ConfigRepr,
    require_choice,
    require_int,
    require_type,
    warn_caller,
)
from drawbar.train._config.tpu_slice import TOPOLOGY_LABEL, compute_slice_workers

PlacementStrategy = Literal["PACK", "SPREAD", "STRICT_PACK", "STRICT_SPREAD"]

_RAY_RESOURCE_NAMES = {"cpu": "CPU", "gpu": "GPU", "tpu": "TPU", "memory": "memory"}


@dataclass(frozen=True, repr=False)
class ScalingConfig(ConfigRepr):
    """How many workers, on what.

    Args:
        trainer_resources: Of Ray Train, which takes None only, as here: a run is its workers.
        num_workers: Number of worker processes, each on its own Ray actor. 0 runs the function in
            this very process, where `pdb` works, with the same reports, checkpoints and `Result`.
            (low, high) is elastic: the run starts with what there is room for, goes on with fewer
            when workers are lost, and takes in new ones when a checkpoint is committed.
        use_gpu: One GPU per worker, unless `resources_per_worker` says how many.
        resources_per_worker: Ray resources of one worker, such as `{"CPU": 4, "GPU": 1}`; `memory`
            is in bytes, any other key is a custom resource. Default `{"CPU": 1}`, with `use_gpu`
            `{"GPU": 1}`.
        placement_strategy: Ray's placement group strategy: "PACK" (as few nodes as possible),
            "SPREAD", "STRICT_PACK" (one node or fail), "STRICT_SPREAD" (a node each or fail).
        accelerator_type: Only nodes with this accelerator, such as "A100"
            (`ray.util.accelerators`).
        label_selector: Ray node labels that a worker's node must have: one mapping for all workers,
            or a list with one mapping per worker.
        use_tpu: One TPU per worker, unless `resources_per_worker` says how many.
        topology: Of a slice of TPUs, such as "2x2x2", with `use_tpu` and `accelerator_type`:
            workers are on nodes of such slices, by default one on each host with all of its chips.
            Where the cluster has several of them, name the slice by
            `label_selector={"ray.io/tpu-slice-name": ...}`.
        elastic_resize_monitor_interval_s: Of Ray Train; changes nothing here, and says so: a group
            is resized when a checkpoint is committed.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range; the message says which.
    """

    trainer_resources: InitVar[None] = None
    num_workers: int | tuple[int, int] = 1
    use_gpu: bool = False
    resources_per_worker: Mapping[str, float] | None = None
    placement_strategy: PlacementStrategy = "PACK"
    accelerator_type: str | None = None
    label_selector: Mapping[str, str] | Sequence[Mapping[str, str]] | None = None
    use_tpu: bool = False
    topology: str | None = None
    elastic_resize_monitor_interval_s: InitVar[float | None] = None

    def __post_init__(
        self,
        trainer_resources: None,
        elastic_resize_monitor_interval_s: float | None,
    ) -> None:
        _check_ignored_arguments(trainer_resources, elastic_resize_monitor_interval_s)
        self._check_num_workers()
        require_type("ScalingConfig.use_gpu", self.use_gpu, bool)
        require_type("ScalingConfig.use_tpu", self.use_tpu, bool)
        if self.use_gpu and self.use_tpu:
            raise ValueError(
                "ScalingConfig has use_gpu=True and use_tpu=True; a worker uses one kind"
            )
        require_choice(
            "ScalingConfig.placement_strategy", self.placement_strategy, get_args(PlacementStrategy)
        )
        if self.accelerator_type is not None:
            require_type("ScalingConfig.accelerator_type", self.accelerator_type, str)
        self._check_resources()
        self._check_labels()
        self._check_topology()

    def _check_num_workers(self) -> None:
        if not isinstance(self.num_workers, tuple | list):
            require_int("ScalingConfig.num_workers", self.num_workers, at_least=0)
            return
        if len(self.num_workers) != 2:
            raise ValueError(
                "ScalingConfig.num_workers must be an int, or (low, high) for an elastic group, "
                f"found {self.num_workers!r}"
            )
        # A list is one too: configs that come out of YAML or JSON have no tuples.
        low, high = self.num_workers
        require_int("ScalingConfig.num_workers[0]", low, at_least=1)
        require_int("ScalingConfig.num_workers[1]", high, at_least=low)
        object.__setattr__(self, "num_workers", (low, high))

    def _check_resources(self) -> None:
        resources = self.resources_per_worker
        if resources is None:
            return
        require_type("ScalingConfig.resources_per_worker", resources, Mapping)
        for key, amount in resources.items():
            require_type("ScalingConfig.resources_per_worker: a key", key, str)
            name = f"ScalingConfig.resources_per_worker[{key!r}]"
            if key != (meant := _RAY_RESOURCE_NAMES.get(key.lower(), key)):
                raise ValueError(f"{name} is no resource of Ray's; write {meant!r}")
            if isinstance(amount, bool) or not isinstance(amount, int | float):
                raise TypeError(f"{name} must be a number, found {amount!r}")
            if not 0 <= amount < math.inf:
                raise ValueError(f"{name} must be finite and not negative, found {amount!r}")
        for kind, used in (("GPU", self.use_gpu), ("TPU", self.use_tpu)):
            _check_accelerator(kind, used, resources)

    def _check_labels(self) -> None:
        selector = self.label_selector
        if selector is None or isinstance(selector, Mapping):
            return
        is_list = isinstance(selector, Sequence) and not isinstance(selector, str)
        if not is_list or not all(isinstance(each, Mapping) for each in selector):
            raise TypeError(
                "ScalingConfig.label_selector must be a mapping, or a list with one mapping per "
                f"worker, found {selector!r}"
            )
        if len(selector) != self.max_workers:
            raise ValueError(
                f"ScalingConfig.label_selector lists {len(selector)} selectors for "
                f"num_workers={self.num_workers}; give one per worker, or one mapping for all"
            )

    def _check_topology(self) -> None:
        if self.topology is None:
            if self.use_tpu and self.max_workers > 1 and not self.label_selector:
                raise ValueError(
                    f"ScalingConfig has use_tpu=True and num_workers={self.num_workers}: their "
                    "TPUs must be of one slice; set topology= and accelerator_type=, such as "
                    'topology="2x2x2", accelerator_type="TPU-V4", or name the slice by '
                    'label_selector={"ray.io/tpu-slice-name": ...}'
                )
            return
        require_type("ScalingConfig.topology", self.topology, str)
        if not self.use_tpu or self.accelerator_type is None:
            missing = "accelerator_type=" if self.use_tpu else "use_tpu=True"
            raise ValueError(
                f"ScalingConfig has topology={self.topology!r}, which is that of a slice of TPUs; "
                f"set {missing} too"
            )
        each, _ = compute_slice_workers(
            self.topology, self.accelerator_type, self.resources_per_worker
        )
        if self.max_workers % each or self.min_workers % each:
            raise ValueError(
                f"ScalingConfig has num_workers={self.num_workers}, but a slice of topology "
                f"{self.topology!r} has {each} workers; set a multiple of {each}"
            )

    @property
    def bundle(self) -> dict[str, float]:
        """Resources of one worker, defaults filled in and zero entries dropped."""
        resources = dict(self.resources_per_worker or {})
        if self.use_gpu:
            resources.setdefault("GPU", 1)
        elif self.use_tpu:
            resources.setdefault("TPU", self._chips_per_worker)
        elif self.resources_per_worker is None:
            resources["CPU"] = 1
        if self.accelerator_type:
            # As Ray itself does: a sliver of a resource that only nodes with such an accelerator
            # have.
            resources[f"accelerator_type:{self.accelerator_type}"] = 0.001
        return {key: float(amount) for key, amount in resources.items() if amount}

    @property
    def _chips_per_worker(self) -> float:
        if self.topology is None or self.accelerator_type is None:
            return 1
        return compute_slice_workers(self.topology, self.accelerator_type, None)[1]

    @property
    def total_resources(self) -> dict[str, float]:
        """Resources of all workers together, at the largest number of them."""
        return {key: amount * max(self.max_workers, 1) for key, amount in self.bundle.items()}

    @property
    def elasticity_enabled(self) -> bool:
        """Whether the number of workers may change while the run goes on."""
        return isinstance(self.num_workers, tuple)

    @property
    def min_workers(self) -> int:
        """The smallest number of workers that the run goes on with."""
        return self.num_workers[0] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def max_workers(self) -> int:
        """The largest number of workers."""
        return self.num_workers[1] if isinstance(self.num_workers, tuple) else self.num_workers

    @property
    def label_selectors(self) -> list[dict[str, str]]:
        """The label selector of each worker; empty if there is none."""
        selector = self.label_selector or {}
        of_slice = {} if self.topology is None else {TOPOLOGY_LABEL: self.topology}
        if not (of_slice or selector):
            return []
        each = [selector] * self.max_workers if isinstance(selector, Mapping) else selector
        return [{**of_slice, **one} for one in each]

    @property
    def num_cpus_per_worker(self) -> float:
        """CPUs of one worker."""
        return self.bundle.get("CPU", 0.0)

    @property
    def num_gpus_per_worker(self) -> float:
        """GPUs of one worker."""
        return self.bundle.get("GPU", 0.0)

    @property
    def num_tpus_per_worker(self) -> float:
        """TPUs of one worker."""
        return self.bundle.get("TPU", 0.0)

    @property
    def additional_resources_per_worker(self) -> dict[str, float]:
        """What one worker takes beside CPUs, GPUs and TPUs."""
        return {key: n for key, n in self.bundle.items() if key not in ("CPU", "GPU", "TPU")}


def _check_ignored_arguments(
    trainer_resources: object, elastic_resize_monitor_interval_s: object
) -> None:
    """Check what is taken from Ray Train and has no use here."""
    if trainer_resources is not None:
        raise ValueError(
            f"ScalingConfig.trainer_resources must be None, found {trainer_resources!r}: a run is "
            "its workers, and nothing else takes resources. Did you mean num_workers= or "
            "resources_per_worker=?"
        )
    if elastic_resize_monitor_interval_s is not None:
        warn_caller(
            "ScalingConfig.elastic_resize_monitor_interval_s changes nothing: an elastic group "
            "takes in new workers whenever a checkpoint is committed"
        )


def _check_accelerator(kind: str, used: bool, resources: Mapping[str, float]) -> None:
    amount, option = resources.get(kind, 0), f"use_{kind.lower()}"
    if used and kind in resources and not amount:
        raise ValueError(
            f"ScalingConfig has {option}=True and resources_per_worker[{kind!r}]=0; "
            f"set {option}=False or ask for a {kind}"
        )
    if amount and not used:
        raise ValueError(
            f"ScalingConfig has resources_per_worker[{kind!r}]={amount} and {option}=False; "
            f"set {option}=True so that the workers use their {kind}s"
        )
