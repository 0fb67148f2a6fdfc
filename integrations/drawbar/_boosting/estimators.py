"""Base class of the scikit-learn estimators of both libraries.

The estimators are subclasses of the library's estimators whose `fit` uses a trainer. Checks before
it, and attributes and `predict` after it, are inherited.
"""

from __future__ import annotations

import copy
import inspect
import secrets
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from drawbar._boosting.predict import Predictor
from drawbar.train import LoggingConfig, RunConfig, ScalingConfig

DRAWBAR_PARAMETERS = ("scaling_config", "run_config")

T = TypeVar("T", bound=type)

PrepareBatch = Callable[[Any, Any], object]
"""Function that returns the table to predict, from an estimator and a batch of a Ray Dataset."""


class RayEstimator:
    """Mixin with the additional arguments of the estimators. Place it before the library's class.

    Args:
        scaling_config: Number of workers and their resources. Default: one worker.
        run_config: Run configuration: storage, restarts, output. Each `fit` is a separate run, so a
            suffix is added to `name`. Default: a temporary directory that is deleted when `fit`
            ends, and only warnings and errors on the console.
        plain: Arguments of the library's estimator.
    """

    def __init__(
        self,
        *,
        scaling_config: ScalingConfig | None = None,
        run_config: RunConfig | None = None,
        **plain: object,
    ) -> None:
        super().__init__(**plain)
        self.scaling_config = scaling_config
        self.run_config = run_config

    @contextmanager
    def _trainer_configs(self) -> Iterator[dict[str, Any]]:
        """Yield the configurations of a trainer."""
        if self.run_config is not None:
            name = self.run_config.name and f"{self.run_config.name}_{secrets.token_hex(4)}"
            run_config = replace(self.run_config, name=name)
            yield {"scaling_config": self.scaling_config, "run_config": run_config}
            return
        with tempfile.TemporaryDirectory(prefix="drawbar-") as directory:
            logging_config = LoggingConfig(log_level="WARNING")
            run_config = RunConfig(storage_path=directory, logging_config=logging_config)
            yield {"scaling_config": self.scaling_config, "run_config": run_config}


def add_drawbar_parameters(estimator: T) -> T:
    """Set the signature of an estimator to its base class's plus `DRAWBAR_PARAMETERS`.

    scikit-learn uses it to find the parameters for `get_params`, `clone`, and grid search.
    """
    estimator_class: Any = estimator
    plain: Any = next(
        base for base in estimator_class.__mro__[1:] if not issubclass(base, RayEstimator)
    )
    signature = inspect.signature(plain.__init__)
    keyword = inspect.Parameter.KEYWORD_ONLY
    added = [inspect.Parameter(name, keyword, default=None) for name in DRAWBAR_PARAMETERS]
    *named, rest = signature.parameters.values()

    def __init__(self: Any, **arguments: object) -> None:  # a separate function for each class
        super(estimator_class, self).__init__(**arguments)

    __init__.__signature__ = signature.replace(  # type: ignore[attr-defined]  # inspect reads it
        parameters=[*named, *added, rest]
    )
    estimator_class.__init__ = __init__
    return estimator


def drop_drawbar_parameters(params: Mapping[str, object]) -> dict[str, object]:
    """Return an estimator's parameters without `DRAWBAR_PARAMETERS`."""
    return {name: value for name, value in params.items() if name not in DRAWBAR_PARAMETERS}


def make_predictor_factory(
    estimator: Any, method: str, prepare: PrepareBatch, options: Mapping[str, object]
) -> Callable[[], Predictor]:
    """Return a function that creates a predictor in each process that predicts.

    Args:
        estimator: Fitted estimator.
        method: Name of the estimator's method that predicts a table.
        prepare: Returns the table to predict, from the estimator and a batch of a Ray Dataset.
        options: Arguments of the method.
    """
    local_estimator = copy.copy(estimator)
    local_estimator.scaling_config = local_estimator.run_config = None
    local_estimator.n_jobs = 1
    if hasattr(local_estimator, "callbacks"):
        local_estimator.callbacks = None
    return partial(_predictor, local_estimator, method, prepare, dict(options))


def _predictor(
    estimator: object, method: str, prepare: PrepareBatch, options: Mapping[str, object]
) -> Predictor:
    return lambda batch: getattr(estimator, method)(prepare(estimator, batch), **options)
