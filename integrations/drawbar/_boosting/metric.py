"""allreduce_metric: combine a metric over the rows of all workers."""

from __future__ import annotations

from drawbar.train import collective


def allreduce_metric(numerator: float, denominator: float) -> float:
    """Compute a metric over the rows of all workers: sum of numerators / sum of denominators.

    Use it in custom metrics, which see only the rows of one worker. Collective: call it on all
    ranks.

    Args:
        numerator: Numerator of this worker, such as the sum of errors.
        denominator: Denominator of this worker, such as the number of rows.

    Returns:
        The global metric; NaN if the denominators sum to 0.

    Raises:
        RuntimeError: Called outside a training function.

    Example:
        ```python
        def mean_error(predictions, data):
            errors = abs(predictions - data.get_label())
            # For LightGBM, also return whether higher values are better.
            return "mean_error", allreduce_metric(errors.sum(), len(errors))
        ```
    """
    parts = collective.all_gather((float(numerator), float(denominator)))
    numerators, denominators = zip(*parts, strict=True)
    total = sum(denominators)
    return sum(numerators) / total if total else float("nan")
