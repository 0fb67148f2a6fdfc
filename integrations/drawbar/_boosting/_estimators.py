"""What the scikit-learn estimators of both libraries share.

Such an estimator is the plain library's own, with `fit` done by a trainer: everything before (the
checks, the classes) and after (attributes, `predict`) is the plain estimator's.
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

from drawbar._boosting._predict import Predictor
from drawbar.train import LoggingConfig, RunConfig, ScalingConfig

DRAWBAR_PARAMETERS = ("scaling_config", "run_config")

T = TypeVar("T", bound=type)

PrepareBatch = Callable[[Any, Any], object]
"""Gives the table to predict from, of an estimator and a batch of a Ray Dataset."""


class RayEstimator:
    """The two arguments that a plain estimator gets in addition. Put it before that class.

    Args:
        scaling_config: How many workers, on what. Default: one.
        run_config: Where the run lies, restarts, output. Each `fit` is a run of its own, so a name
            gets a suffix. Default: a folder that goes when `fit` ends, with warnings and errors
            shown only.
        plain: The plain estimator's own arguments.
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
        """Give a trainer's configs."""
        if self.run_config is not None:
            name = self.run_config.name and f"{self.run_config.name}_{secrets.token_hex(4)}"
            run_config = replace(self.run_config, name=name)
            yield {"scaling_config": self.scaling_config, "run_config": run_config}
            return
        with tempfile.TemporaryDirectory(prefix="drawbar-") as folder:
            quiet = LoggingConfig(log_level="WARNING")
            run_config = RunConfig(storage_path=folder, logging_config=quiet)
            yield {"scaling_config": self.scaling_config, "run_config": run_config}


def add_drawbar_parameters(estimator: T) -> T:
    """Give an estimator the signature of its plain one, with `DRAWBAR_PARAMETERS` added.

    scikit-learn learns from it which parameters `get_params`, `clone` and a grid search have.
    """
    estimator_class: Any = estimator
    plain: Any = next(
        base for base in estimator_class.__mro__[1:] if not issubclass(base, RayEstimator)
    )
    signature = inspect.signature(plain.__init__)
    keyword = inspect.Parameter.KEYWORD_ONLY
    own = [inspect.Parameter(name, keyword, default=None) for name in DRAWBAR_PARAMETERS]
    *named, rest = signature.parameters.values()

    def __init__(self: Any, **arguments: object) -> None:  # one of this class alone
        super(estimator_class, self).__init__(**arguments)

    __init__.__signature__ = signature.replace(  # type: ignore[attr-defined]  # inspect reads it
        parameters=[*named, *own, rest]
    )
    estimator_class.__init__ = __init__
    return estimator


def drop_drawbar_parameters(params: Mapping[str, object]) -> dict[str, object]:
    """Give an estimator's parameters without those that the library does not know."""
    return {name: value for name, value in params.items() if name not in DRAWBAR_PARAMETERS}


def make_predictor_factory(
    estimator: Any, method: str, prepare: PrepareBatch, options: Mapping[str, object]
) -> Callable[[], Predictor]:
    """Give what makes, in a process that predicts, a function from features to predictions.

    Args:
        estimator: Fitted.
        method: Its method that predicts, called with tables in memory.
        prepare: Gives the table for it, of the estimator and a batch of a Ray Dataset.
        options: Of the method.
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
