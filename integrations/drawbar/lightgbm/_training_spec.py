"""LightGBMTrainingSpec: train from parameters on each worker.

On resume, rows start from the predictions of the earlier trees. The datasets contain no features,
so that `lightgbm.train` cannot compute these predictions from an `init_model`. LightGBM sums leaf
values in the order of the trees in training and prediction, so that the scores are identical to an
uninterrupted run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from drawbar._boosting.reader import ColumnFormat
from drawbar._boosting.shard import Shard
from drawbar._boosting.training_spec import TrainingSpec
from drawbar.lightgbm._backend import add_network_parameters
from drawbar.lightgbm._data import compute_shared_bins, make_dataset
from drawbar.lightgbm._parameters import (
    check_labels,
    check_parameters,
    choose_histogram_layout,
    find_alias,
    get_argument_aliases,
    get_parameter,
    needs_random_rows,
)
from drawbar.lightgbm._start_score import StartScoreCallback, compute_start_score
from drawbar.lightgbm._train import (
    add_report_callback,
    early_stopping,
    load_resume_state,
    run_rounds,
)
from drawbar.train import ScalingConfig, get_checkpoint


@dataclass(frozen=True, kw_only=True)
class LightGBMTrainingSpec(TrainingSpec):
    """Training with LightGBM that is described by parameters.

    Args:
        num_boost_round: Total number of rounds. Default: 100, as in `lightgbm.train`.
        feval: Custom metric of `lightgbm.train`, or a list of them.
    """

    column_format = ColumnFormat(  # as in LightGBM
        keep_float64=True, negative_is_missing=True, has_default_margin=False
    )

    num_boost_round: int = 100
    feval: Any | None = None

    @classmethod
    def get_parameter_aliases(cls) -> Mapping[str, Sequence[str]]:
        """Return names in `params` that stand for an argument: argument to names."""
        return get_argument_aliases()

    @property
    def runs_user_code(self) -> bool:
        """Whether user code runs on the workers."""
        objective = get_parameter(self.params, "objective")
        return super().runs_user_code or callable(objective) or bool(self.feval)

    @property
    def needs_random_rows(self) -> bool:
        """True if the objective needs a random sample of the rows on each worker."""
        return needs_random_rows(self.params)

    def validate(self, scaling_config: ScalingConfig) -> None:
        """Check the parameters in the driver."""
        if len(self.columns.labels) > 1:
            raise ValueError(
                f"label_column is {list(self.columns.labels)}, but LightGBM supports one output. "
                "Train one model per label."
            )
        check_parameters(self.params, scaling_config)

    def train(self, shards: dict[str, Shard]) -> None:
        """Train on this worker and report each round."""
        for shard in shards.values():
            check_labels(shard, self.params)
        params = self._params(len(shards["train"].schema.features))
        callbacks = add_report_callback(self.callbacks)
        if self.early_stopping_rounds is not None:
            callbacks.append(early_stopping(self.early_stopping_rounds, params))
        earlier, progress = load_resume_state(params, get_checkpoint(), callbacks)
        start_score = None if earlier else compute_start_score(shards["train"], params)
        if start_score is not None:
            callbacks.append(StartScoreCallback(start_score))
        bins = compute_shared_bins(shards["train"], params)
        datasets = {
            name: make_dataset(shard, bins, params, earlier, start_score)
            for name, shard in shards.items()
        }
        shards.clear()  # the datasets contain all data
        train_set = datasets.pop("train")
        for dataset in datasets.values():
            dataset.reference = train_set  # LightGBM can only set it if there are raw data
        if get_parameter(params, "is_provide_training_metric"):
            datasets = {"train": train_set, **datasets}
        run_rounds(
            params,
            self.num_boost_round,
            callbacks,
            earlier,
            progress,
            train_name="train",
            train_set=train_set,
            valid_sets=list(datasets.values()) or None,
            valid_names=list(datasets),
            feval=self.feval,
            keep_training_booster=True,  # else, LightGBM converts the booster to text and back
        )

    def _params(self, features: int) -> dict[str, object]:
        """Add this worker's parameters to those that the user has not set."""
        params = {"verbosity": -1, **add_network_parameters(self.params)}
        alias = find_alias(params, "objective")
        if alias is not None and callable(objective := params[alias]):
            # `lightgbm.train` copies the parameters except functions. The objective itself may
            # share its state with a callback.
            params[alias] = lambda predictions, data: objective(predictions, data)
        return {**choose_histogram_layout(params, features), **params}
