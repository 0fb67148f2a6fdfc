"""as_placement_group_factory: resources of a trial."""

from __future__ import annotations

from ray.tune import PlacementGroupFactory

from drawbar.train import ScalingConfig, ValidationConfig

_EMPTY_BUNDLE = {"CPU": 0.001}  # Ray has no empty bundles


def as_placement_group_factory(
    scaling_config: ScalingConfig, validation_config: ValidationConfig | None = None
) -> PlacementGroupFactory:
    """Return the resources of a trial for `ray.tune.with_resources`.

    The function of the trial, which calls `fit()`, needs no resources itself. All workers are in
    the placement group of the trial, so Ray places either the complete trial or nothing, and trials
    do not block each other.

    Args:
        scaling_config: Number of workers and their resources. An elastic run gets its maximum.
        validation_config: Validation whose task resources are added. Default: none.

    Returns:
        A placement group factory with one bundle per worker.

    Example:
        ```python
        resources = as_placement_group_factory(ScalingConfig(num_workers=4, use_gpu=True))
        tuner = tune.Tuner(tune.with_resources(trial, resources))
        ```
    """
    worker = scaling_config.bundle or _EMPTY_BUNDLE
    if scaling_config.max_workers == 0:  # training runs in the process of the trial
        return PlacementGroupFactory([worker])
    bundles = [worker] * scaling_config.max_workers
    labels = scaling_config.label_selectors
    if validation_config is not None and validation_config.task_resources:
        bundles += [dict(validation_config.task_resources)] * validation_config.max_concurrent
    options = {}
    if labels:
        num_unlabeled = len(bundles) - len(labels)
        options["bundle_label_selector"] = [*labels, *[{} for _ in range(num_unlabeled)]]
    strategy = scaling_config.placement_strategy
    return PlacementGroupFactory([{}, *bundles], strategy=strategy, **options)
