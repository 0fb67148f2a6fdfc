"""Private APIs of LightGBM, scikit-learn, and PyArrow; read in LightGBM 4.6 to 4.7.

No other file of this package uses them. LightGBM's C API is public and stable, but the Python
package gives no access to the loaded library.
"""

from __future__ import annotations

import ctypes
from typing import Any, cast

import pyarrow as pa
from lightgbm import Booster, Dataset, LGBMModel

from drawbar.train.backend import import_private

ConfigAliases = import_private("lightgbm.basic", "_ConfigAliases")
EvalFunctionWrapper = import_private("lightgbm.sklearn", "_EvalFunctionWrapper")
check_error = import_private("lightgbm.basic", "_safe_call")
format_parameters = import_private("lightgbm.basic", "_param_dict_to_str")
LIBRARY = import_private("lightgbm.basic", "_LIB")
"""LightGBM's C library."""


def get_handle(booster: Booster) -> ctypes.c_void_p:
    """Return the handle of a booster in the C library."""
    handle: ctypes.c_void_p = cast("Any", booster)._handle
    return handle


def make_dataset(handle: ctypes.c_void_p, params: dict[str, object]) -> Dataset:
    """Return the dataset of a handle of the C library."""
    dataset = Dataset(None, params=params)
    dataset._handle = handle
    return dataset


def export_to_arrow_c(exported: pa.RecordBatch | pa.Schema, address: int) -> None:
    """Write a batch or a schema to a structure of Arrow's C data interface.

    PyArrow's public capsules own their structures. LightGBM needs an array of structures.
    """
    exported._export_to_c(address)


def check_sample_weight(weight: object, X: object) -> Any:
    """Validate the weights of rows like `LGBMModel.fit`, which also uses this function."""
    from sklearn.utils.validation import _check_sample_weight

    return _check_sample_weight(weight, X)


class EstimatorHooks(LGBMModel):
    """Estimator with public access to the parameters and results that `LGBMModel.fit` handles."""

    def filter_params(self, params: dict[str, Any], stage: str) -> dict[str, Any]:
        """Return the parameters for LightGBM at a stage, which is "fit" or "predict"."""
        return params

    def process_params(self) -> dict[str, Any]:
        """Return the parameters for training."""
        return self._process_params("fit")

    def _process_params(self, stage: str) -> dict[str, Any]:
        return self.filter_params(super()._process_params(stage), stage)

    def get_class_weight(self) -> Any:
        """Return the weights of classes, by number for classifiers."""
        if self._class_weight is None:
            self._class_weight = self.class_weight
        return self._class_weight

    def set_fitted_attributes(
        self,
        booster: Booster,
        history: dict[str, dict[str, list[float]]],
        *,
        last_round: int,
        has_names: bool,
    ) -> None:
        """Set the attributes that LightGBM's estimator sets after training.

        Args:
            booster: The trained model.
            history: Values of each metric of each dataset.
            last_round: Index of the best round in `history`.
            has_names: Whether the features have names.
        """
        self._Booster = booster
        self._n_features = self.n_features_in_ = booster.num_feature()
        self._fitted_with_feature_names = has_names
        self._evals_result = history
        self._best_iteration = max(booster.best_iteration, 0)
        self._best_score = {
            data: {metric: values[last_round] for metric, values in by_metric.items()}
            for data, by_metric in history.items()
        }
        booster.best_score = self._best_score
        self.fitted_ = True


def get_class_numbers(estimator: object) -> dict[object, int] | None:
    """Return the number of each class of a fitted classifier by its name."""
    numbers: dict[object, int] | None = cast("Any", estimator)._class_map
    return numbers
