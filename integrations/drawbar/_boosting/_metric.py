"""A metric of all workers' rows, out of what each knows of its own."""

from __future__ import annotations

from drawbar.train import collective


def allreduce_metric(numerator: float, denominator: float) -> float:
    """Reduce a metric of all workers' rows: the sum of numerators over the sum of denominators.

    For custom metrics, which see the rows of one worker only:

        def mean_error(predictions, data):
            errors = abs(predictions - data.get_label())
            return "mean_error", allreduce_metric(errors.sum(), len(errors))

    LightGBM wants a third value of such a function: whether higher is better. A collective: every
    rank calls it. NaN if the denominators sum to 0.

    Raises:
        RuntimeError: Called outside a training function.
    """
    parts = collective.all_gather((float(numerator), float(denominator)))
    numerators, denominators = zip(*parts, strict=True)
    whole = sum(denominators)
    return sum(numerators) / whole if whole else float("nan")
