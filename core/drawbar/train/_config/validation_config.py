"""Configure the validation of checkpoints and resolve the request of a report.

`report(..., validation=...)` requests the validation of its checkpoint. The manifest records the
request at commit time, and a second file next to the manifest stores the result. A killed process
therefore loses no request, and a validation never changes committed files.
`_controller/validations.py` runs the validations.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import msgspec

from drawbar._base.fields import (
    ConfigRepr,
    at_least,
    parse_duration,
    require_type,
    to_journal_dict,
)
from drawbar._base.train_function import check_plain_function
from drawbar._storage.manifest import Validation

if TYPE_CHECKING:
    from drawbar._storage.checkpoint import Checkpoint


class ValidationFn(Protocol):
    """Validation function: receives the checkpoint and `fn_kwargs`, and returns metrics.

    Example:
        ```python
        def validate(checkpoint, num_batches=100):
            with checkpoint.as_directory() as path:
                return {"accuracy": evaluate(load_model(path), num_batches)}
        ```
    """

    def __call__(
        self, checkpoint: Checkpoint, /, *args: Any, **kwargs: Any
    ) -> Mapping[str, object]:
        """Validate a checkpoint.

        Args:
            checkpoint: Checkpoint to validate.
            args: Not used by Drawbar.
            kwargs: `ValidationTaskConfig.fn_kwargs`.

        Returns:
            Metrics, with values that `report()` accepts.
        """
        ...


@dataclass(frozen=True, repr=False)
class ValidationTaskConfig(ConfigRepr):
    """Arguments and time limit of one validation.

    Args:
        fn_kwargs: Keyword arguments for the validation function. They are stored with the
            checkpoint as JSON, so the function receives tuples as lists.
        timeout_s: Time limit for the function, in seconds or as a timedelta. Waiting for resources
            does not count. None sets no limit.

    Raises:
        TypeError: An argument has the wrong type, or `fn_kwargs` cannot be stored as JSON.
        ValueError: `timeout_s` is not positive and finite.

    Example:
        >>> ValidationTaskConfig(fn_kwargs={"num_batches": 20}, timeout_s=600)
        ValidationTaskConfig(fn_kwargs={'num_batches': 20}, timeout_s=600.0)
    """

    fn_kwargs: Mapping[str, object] | None = None
    timeout_s: Annotated[
        float | timedelta | None, partial(parse_duration, none_meaning="sets no limit")
    ] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "fn_kwargs", _to_json_kwargs(self.fn_kwargs))


@dataclass(frozen=True, repr=False)
class ValidationConfig(ConfigRepr):
    """Validation of checkpoints in parallel with training.

    Args:
        fn: Validation function, called as `fn(checkpoint, **fn_kwargs)` in a separate Ray task, or
            in a thread if `num_workers=0`. It returns a dict of metrics with values that `report()`
            accepts. They are added to the metrics of the checkpoint and replace metrics of the same
            name.
        task_config: Default `fn_kwargs` and `timeout_s` of a validation. A report that passes a
            `ValidationTaskConfig` adds to these `fn_kwargs` and replaces this `timeout_s`.
        ray_remote_kwargs: Options of the task, as for `ray.remote`: resources such as
            `{"num_gpus": 1}`, `max_retries`, `runtime_env`. By default, the task reserves no CPU so
            that it starts immediately, is retried three times if its process or node dies, and has
            the `runtime_env` of the workers.
        max_concurrent: Maximum number of validations that run at the same time. Others are queued,
            oldest checkpoint first.

    Raises:
        TypeError: An argument has the wrong type, or `fn` cannot be called with the checkpoint and
            `fn_kwargs`.
        ValueError: An argument is out of range, or Ray does not accept `ray_remote_kwargs`.

    Example:
        ```python
        trainer = DataParallelTrainer(
            train_func,
            validation_config=ValidationConfig(validate, ray_remote_kwargs={"num_gpus": 1}),
        )
        ```
    """

    fn: ValidationFn
    task_config: ValidationTaskConfig | None = None
    ray_remote_kwargs: Mapping[str, object] | None = None
    max_concurrent: Annotated[int, at_least(1)] = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        check_plain_function("validation function", self.fn)
        super().__post_init__()
        if self.task_config is None:
            object.__setattr__(self, "task_config", ValidationTaskConfig())
        self._check_signature()
        object.__setattr__(self, "ray_remote_kwargs", dict(self.ray_remote_kwargs or {}))
        self._check_task_options()

    def _check_signature(self) -> None:
        try:
            signature = inspect.signature(self.fn)
        except ValueError:
            return  # Some functions that are implemented in C have no signature.
        try:
            signature.bind_partial(None, **self.default_validation.fn_kwargs)
        except TypeError as error:
            names = ", ".join(["checkpoint", *self.default_validation.fn_kwargs])
            raise TypeError(
                f"the validation function takes {signature} and would be called with {names}: "
                f"{error}"
            ) from None

    def _check_task_options(self) -> None:
        import ray

        options = self.task_options
        if "num_returns" in options:
            raise ValueError(
                "ValidationConfig.ray_remote_kwargs must not contain num_returns: the validation "
                "function returns one dict"
            )
        try:
            # Let Ray check the options now; otherwise they fail after the first checkpoint.
            ray.remote(**{"num_cpus": 0, **options})(_placeholder_task)
        except (TypeError, ValueError) as error:
            raise type(error)(f"ValidationConfig.ray_remote_kwargs={options!r}: {error}") from None

    def to_settings(self) -> dict[str, object]:
        """Return the settings that a resumed run compares with its last start."""
        return {**to_journal_dict(self), "fn": getattr(self.fn, "__qualname__", repr(self.fn))}

    @property
    def default_validation(self) -> Validation:
        """Validation for reports with `validation=True`."""
        assert self.task_config is not None  # set in __post_init__
        return _apply_task_config(Validation(), self.task_config)

    @property
    def task_options(self) -> dict[str, Any]:
        """Options of the Ray task that differ from the defaults."""
        return dict(self.ray_remote_kwargs or {})

    @property
    def task_resources(self) -> dict[str, float]:
        """Ray resources of one validation."""
        options = self.task_options
        option_names = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        resources = {name: options.get(option) or 0 for name, option in option_names.items()}
        resources.update(options.get("resources") or {})
        return {name: float(amount) for name, amount in resources.items() if amount}


def resolve_validation(
    request: object, default_validation: Validation | None, *, has_checkpoint: bool
) -> Validation | None:
    """Return the validation that a report requests.

    Args:
        request: Argument `validation` of `report()`.
        default_validation: Default of the trainer's `validation_config`, None without one.
        has_checkpoint: Whether the report has a checkpoint.

    Returns:
        The validation, or None if the report requests none.

    Raises:
        TypeError: `request` is neither a bool nor a `ValidationTaskConfig`.
        ValueError: The report has no checkpoint, or the trainer has no `validation_config`.
    """
    if not isinstance(request, bool | ValidationTaskConfig):
        raise TypeError(
            f"report(validation=...) takes True, False or a ValidationTaskConfig, found {request!r}"
        )
    if request is False:
        return None
    if not has_checkpoint:
        raise ValueError("report(validation=...) needs a checkpoint to validate; pass checkpoint=")
    if default_validation is None:
        raise ValueError(
            "report(validation=...) needs a validation function; pass "
            "validation_config=ValidationConfig(fn) to the trainer"
        )
    return (
        default_validation if request is True else _apply_task_config(default_validation, request)
    )


def _apply_task_config(request: Validation, config: ValidationTaskConfig) -> Validation:
    """Return the validation with the arguments and time limit of a config."""
    assert not isinstance(config.timeout_s, timedelta)  # converted in __post_init__
    return msgspec.structs.replace(
        request,
        fn_kwargs={**request.fn_kwargs, **(config.fn_kwargs or {})},
        timeout_s=request.timeout_s if config.timeout_s is None else config.timeout_s,
    )


def _to_json_kwargs(fn_kwargs: Mapping[str, object] | None) -> dict[str, object]:
    """Return keyword arguments after a round trip through JSON."""
    name = "ValidationTaskConfig.fn_kwargs"
    if fn_kwargs is None:
        return {}
    for key in fn_kwargs:
        require_type(f"{name}: a key", key, str)
    try:
        plain: dict[str, object] = json.loads(json.dumps(dict(fn_kwargs), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be JSON-serializable, since it is stored with the checkpoint: {error}; "
            f"found {fn_kwargs!r}"
        ) from None
    return plain


def _placeholder_task() -> None:
    """Do nothing; used to check the options of the task."""
