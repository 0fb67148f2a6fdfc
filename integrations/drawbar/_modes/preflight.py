"""Check the training function and arguments before any process starts.

Each check raises at the user's call of `fit()`, instead of in the log of a worker minutes later.
`pickle_checks.py` and `_storage/write_checks.py` have the other checks. None needs Ray;
`_worker_group.capacity` checks the capacity of the cluster.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Mapping

from drawbar._base.frames import warn_caller
from drawbar._base.train_function import check_plain_function, get_function_name
from drawbar.train._config.run_config import RunConfig


def check_train_function(function: Callable[..., object], *, has_config: bool = False) -> bool:
    """Check the signature of a training function.

    It must be callable without arguments, or with the `train_loop_config`.

    Args:
        function: The training function.
        has_config: Whether there is a `train_loop_config`.

    Returns:
        Whether to pass the config: the function has one required positional argument, or one with a
        default and there is a config. A builtin without a signature gets an existing config.

    Raises:
        TypeError: The function is not callable, is a coroutine or generator function (a call would
            not run it), or needs other arguments. The message has its signature.
    """
    check_plain_function("training function", function)
    try:
        signature = inspect.signature(function)
    except ValueError:  # a builtin without a signature
        return has_config
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    named = [p for p in signature.parameters.values() if p.kind not in variable]
    required = [parameter for parameter in named if parameter.default is parameter.empty]
    if len(required) > 1 or any(p.kind is p.KEYWORD_ONLY for p in required):
        names = ", ".join(parameter.name for parameter in required)
        raise TypeError(
            f"{get_function_name(function)}{signature} requires {names}, but a training "
            "function takes no argument or one positional argument, the train_loop_config. "
            "Bind other arguments with functools.partial"
        )
    positional = [p for p in named if p.kind is not p.KEYWORD_ONLY]
    return len(required) == 1 or (has_config and len(positional) == 1)


def warn_of_unused_config(takes_config: bool, config: object) -> None:
    """Warn if there is a config, but the training function does not take one."""
    if config and not takes_config:
        content = ", ".join(map(repr, config)) if isinstance(config, Mapping) else repr(config)
        warn_caller(
            f"train_loop_config has {content}, but the training function takes no argument, so it "
            "does not receive the config. Define it as `def train(config):`"
        )


def check_json_dict(name: str, value: Mapping[str, object] | None) -> dict[str, object]:
    """Return an argument as a dict after checking that it is JSON-serializable.

    Raises:
        TypeError: The argument is not a dict, or not JSON-serializable.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a dict, found {value!r}")
    try:
        json.dumps(dict(value))
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} must be JSON-serializable: {error}") from error
    return dict(value)


def check_not_detached(config: RunConfig) -> None:
    """Reject `detached=True` for a run in this process.

    Raises:
        ValueError: The run is detached.
    """
    if config.detached:
        raise ValueError(
            "RunConfig.detached=True needs workers that outlive this process, but "
            "ScalingConfig.num_workers=0 runs the function in this process. Set num_workers=1"
        )
