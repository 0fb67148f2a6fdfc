"""TorchftConfig: Ray Train's config for replacing failed workers while the others wait."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from datetime import timedelta
from typing import Annotated, Any

from drawbar.torch._backend import InitMethod, TorchConfig
from drawbar.train.backend import parse_duration


@dataclass(frozen=True)
class TorchftConfig(TorchConfig):
    """`TorchConfig` for `FailureConfig(recovery="in_place")`, under its name in Ray Train.

    Drawbar does not use torchft. The trainer sets `recovery="in_place"` in its `FailureConfig`, so
    the training function prepares its objects with `prepare_model`, `prepare_optimizer`, and
    `prepare_data_loader`. With `max_failures=0`, the default, the run ends with its first failure,
    as in Ray Train.

    Args:
        lighthouse_kwargs: Accepted for compatibility with Ray Train and ignored with a warning,
            because Drawbar needs no lighthouse.
        backend: See `TorchConfig`.
        init_method: See `TorchConfig`.
        timeout_s: See `TorchConfig`.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a wrong value.

    Example:
        ```python
        TorchTrainer(
            train_func,
            torch_config=TorchftConfig(lighthouse_kwargs={}),
            scaling_config=ScalingConfig(num_workers=4),
            run_config=RunConfig(failure_config=FailureConfig(max_failures=10)),
        ).fit()
        ```
    """

    recovers_in_place = True
    lighthouse_kwargs: Mapping[str, Any]
    _: KW_ONLY
    backend: str | None = None
    init_method: InitMethod = "env"
    timeout_s: Annotated[float | timedelta, parse_duration] = 1800

    def __post_init__(self, *_: object) -> None:
        super().__post_init__()
        if self.lighthouse_kwargs:
            warnings.warn(
                "TorchftConfig(lighthouse_kwargs=) has no effect: Drawbar replaces failed workers "
                "without torchft, and needs no lighthouse",
                stacklevel=4,  # this method, and __init__ and __call__ of its class
            )
