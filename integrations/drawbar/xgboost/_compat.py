"""Private APIs of XGBoost, read in XGBoost 3.1 to 3.2. No other file of this package uses them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any, cast

from xgboost import Booster
from xgboost.core import _LIB, _log_callback
from xgboost.sklearn import _get_qid as split_qid
from xgboost.sklearn import _objective_decorator as wrap_objective

__all__ = ["split_qid", "wrap_objective"]


@contextlib.contextmanager
def filter_log(is_wanted: Callable[[bytes], bool]) -> Iterator[None]:
    """Log only some of XGBoost's messages in this thread, in the usual way.

    XGBoost's public setting is the verbosity of all messages.
    """

    def log(message: bytes) -> None:
        if is_wanted(message):
            _log_callback(message)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(log)
    _LIB.XGBRegisterLogCallback(callback)
    try:
        yield
    finally:
        _LIB.XGBRegisterLogCallback(_LIB.callback)  # the one that `import xgboost` registers


def configure_fit(
    estimator: object, model: object, params: dict[str, object], feature_weights: object
) -> tuple[Any, Any, dict[str, object], Any]:
    """Return the model, metric, parameters, and feature weights that `fit` uses."""
    configured: tuple[Any, Any, dict[str, object], Any] = cast("Any", estimator)._configure_fit(
        model, params, feature_weights
    )
    return configured


def set_fitted_attributes(estimator: object, booster: Booster, history: dict[str, Any]) -> None:
    """Set the results of `get_booster()` and `evals_result()`."""
    untyped: Any = estimator
    untyped._Booster = booster
    untyped._set_evaluation_result(history)
