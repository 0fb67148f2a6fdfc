"""What a trial asks Ray Tune for: all that its run needs, in one placement group."""

from __future__ import annotations

from ray.tune import PlacementGroupFactory

from drawbar.train import ScalingConfig, ValidationConfig

_EMPTY_BUNDLE = {"CPU": 0.001}  # Ray has no empty bundles


def as_placement_group_factory(
    scaling_config: ScalingConfig, validation_config: ValidationConfig | None = None
) -> PlacementGroupFactory:
    """Give the resources of a trial whose function calls `fit()`, for `ray.tune.with_resources`.

    The function itself takes none, so a trial costs what its workers cost. They lie in the trial's
    placement group: either all of a trial is placed or nothing, and no trial waits for another one.

    Args:
        scaling_config: The workers. An elastic group gets its largest number.
        validation_config: Validations that ask for resources get them too.
    """
    worker = scaling_config.bundle or _EMPTY_BUNDLE
    if scaling_config.max_workers == 0:  # the function runs in the trial's own process
        return PlacementGroupFactory([worker])
    bundles = [worker] * scaling_config.max_workers
    labels = scaling_config.label_selectors
    if validation_config is not None and validation_config.task_resources:
        bundles += [dict(validation_config.task_resources)] * validation_config.max_concurrent
    options = {}
    if labels:
        rest = len(bundles) - len(labels)
        options["bundle_label_selector"] = [*labels, *[{} for _ in range(rest)]]
    strategy = scaling_config.placement_strategy
    return PlacementGroupFactory([{}, *bundles], strategy=strategy, **options)
