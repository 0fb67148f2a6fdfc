"""Private APIs of XGBoost, read in XGBoost 3.1 to 3.4. No other file of this package uses them."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Iterator
from typing import Any, cast

from xgboost import Booster, core

from drawbar.train.backend import import_private

split_qid = import_private("xgboost.sklearn", "_get_qid")
wrap_objective = import_private("xgboost.sklearn", "_objective_decorator")


@contextlib.contextmanager
def filter_log(is_wanted: Callable[[bytes], bool]) -> Iterator[None]:
    """Log only some of XGBoost's messages in this thread, in the usual way.

    XGBoost's public setting is the verbosity of all messages. Without the private API, all messages
    are logged.
    """
    library: Any = getattr(core, "_LIB", None)
    log_as_usual = getattr(library, "callback", None)  # `import xgboost` registers it
    if log_as_usual is None:
        yield
        return

    def log(message: bytes) -> None:
        if is_wanted(message):
            log_as_usual(message)

    callback = ctypes.CFUNCTYPE(None, ctypes.c_char_p)(log)
    library.XGBRegisterLogCallback(callback)
    try:
        yield
    finally:
        library.XGBRegisterLogCallback(log_as_usual)


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
