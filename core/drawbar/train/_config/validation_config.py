"""Validating checkpoints beside the training: what is asked for, and what came of it.

A validation is asked for by `report(..., validation=...)` and belongs to its checkpoint: the
manifest says that it was asked for, from the commit on, and a second file beside the manifest what
came of it. So no kill loses one, and none touches what is committed. `_controller/validations.py`
has them run.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from drawbar.train._config.checks import (
    ConfigRepr,
    check_plain_function,
    parse_duration,
    require_int,
    require_type,
    to_journal_dict,
)
from drawbar.train._storage.manifest import Validation

if TYPE_CHECKING:
    from drawbar.train._storage.checkpoint import Checkpoint


class ValidationFn(Protocol):
    """A function that validates: called with the checkpoint and `fn_kwargs`, it returns metrics."""

    def __call__(
        self, checkpoint: Checkpoint, /, *args: Any, **kwargs: Any
    ) -> Mapping[str, object]: ...


@dataclass(frozen=True, repr=False)
class ValidationTaskConfig(ConfigRepr):
    """How to validate one checkpoint.

    Args:
        fn_kwargs: Keyword arguments for the validation function: a JSON-able dict, since it is kept
            with the checkpoint. The function gets it as JSON gives it back: tuples are lists.
        timeout_s: How long the function may take, in seconds or as a timedelta, waiting for
            resources not counted. None sets no limit.

    Raises:
        TypeError, ValueError: An argument has the wrong type or range; the message says which.
    """

    fn_kwargs: Mapping[str, object] | None = None
    timeout_s: float | timedelta | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "fn_kwargs", _to_json_kwargs(self.fn_kwargs))
        if self.timeout_s is not None:
            name = "ValidationTaskConfig.timeout_s"
            seconds = parse_duration(name, self.timeout_s, none_meaning="sets no limit")
            object.__setattr__(self, "timeout_s", seconds)


@dataclass(frozen=True, repr=False)
class ValidationConfig(ConfigRepr):
    """How a run validates its checkpoints, beside the training.

    Args:
        fn: Called as `fn(checkpoint, **fn_kwargs)`, in a Ray task of its own; with `num_workers=0`
            in a thread. It returns a dict of metrics, of what `report` takes. They are added to
            those of the checkpoint, in place of what has the same name.
        task_config: The `fn_kwargs` and the `timeout_s` of a validation, unless a report has its
            own: its `fn_kwargs` are added to these, its `timeout_s` takes the place of this one.
        ray_remote_kwargs: Options of the task, as for `ray.remote`: resources such as
            `{"num_gpus": 1}`, `max_retries`, `runtime_env`. By default it reserves no CPU, so that
            it starts at once; a task whose process or node dies is tried three times more, and its
            `runtime_env` is that of the workers.
        max_in_flight: How many validations run at the same time. The others wait for their turn,
            the oldest checkpoint first.

    Raises:
        TypeError, ValueError: An argument cannot be used; the message says which and why.
    """

    fn: ValidationFn
    task_config: ValidationTaskConfig | None = None
    ray_remote_kwargs: Mapping[str, object] | None = None
    max_concurrent: int = field(default=2, kw_only=True)

    def __post_init__(self) -> None:
        check_plain_function("validation function", self.fn)
        if self.task_config is None:
            object.__setattr__(self, "task_config", ValidationTaskConfig())
        require_type("ValidationConfig.task_config", self.task_config, ValidationTaskConfig)
        require_int("ValidationConfig.max_in_flight", self.max_concurrent, at_least=1)
        self._check_signature()
        options = {} if self.ray_remote_kwargs is None else self.ray_remote_kwargs
        require_type("ValidationConfig.ray_remote_kwargs", options, Mapping)
        object.__setattr__(self, "ray_remote_kwargs", dict(options))
        self._check_task_options()

    def _check_signature(self) -> None:
        try:
            signature = inspect.signature(self.fn)
        except ValueError:
            return  # some functions written in C have none
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
                "ValidationConfig.ray_remote_kwargs must leave num_returns out: the validation "
                "function returns one dict"
            )
        try:
            # Ray itself is asked, and says now what it would say after the first checkpoint.
            ray.remote(**{"num_cpus": 0, **options})(_placeholder_task)
        except (TypeError, ValueError) as error:
            raise type(error)(f"ValidationConfig.ray_remote_kwargs={options!r}: {error}") from None

    def to_settings(self) -> dict[str, object]:
        """Give what a resumed run compares with the last start."""
        return {**to_journal_dict(self), "fn": getattr(self.fn, "__qualname__", repr(self.fn))}

    @property
    def default_validation(self) -> Validation:
        """The validation that is asked for if a report says no more than that it wants one."""
        assert self.task_config is not None  # __post_init__ makes one
        return _apply_task_config(Validation(), self.task_config)

    @property
    def task_options(self) -> dict[str, Any]:
        """What the Ray task is told beyond the defaults."""
        return dict(self.ray_remote_kwargs or {})

    @property
    def task_resources(self) -> dict[str, float]:
        """The Ray resources that one validation takes."""
        options = self.task_options
        named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
        resources = {name: options.get(option) or 0 for name, option in named.items()}
        resources.update(options.get("resources") or {})
        return {name: float(amount) for name, amount in resources.items() if amount}


def resolve_validation(
    request: object, defaults: Validation | None, *, has_checkpoint: bool
) -> Validation | None:
    """Give the validation that a report asks for, None if it asks for none.

    Args:
        validation: What `report` was given.
        defaults: What the trainer's `validation_config` says; None if it has none.
        has_checkpoint: Whether the report has a checkpoint.

    Raises:
        TypeError: `validation` is neither a bool nor a `ValidationTaskConfig`.
        ValueError: There is nothing to validate, or nothing to validate with.
    """
    if not isinstance(request, bool | ValidationTaskConfig):
        raise TypeError(
            f"report(validation=...) takes True, False or a ValidationTaskConfig, found {request!r}"
        )
    if request is False:
        return None
    if not has_checkpoint:
        raise ValueError("report(validation=...) needs a checkpoint to validate; give checkpoint=")
    if defaults is None:
        raise ValueError(
            "report(validation=...) needs the trainer to know how; give the trainer "
            "validation_config=ValidationConfig(fn)"
        )
    return defaults if request is True else _apply_task_config(defaults, request)


def _apply_task_config(request: Validation, config: ValidationTaskConfig) -> Validation:
    """Give the validation with what a config says."""
    assert not isinstance(config.timeout_s, timedelta)  # ValidationTaskConfig makes it seconds
    return msgspec.structs.replace(
        request,
        fn_kwargs={**request.fn_kwargs, **(config.fn_kwargs or {})},
        timeout_s=request.timeout_s if config.timeout_s is None else config.timeout_s,
    )


def _to_json_kwargs(fn_kwargs: object) -> dict[str, object]:
    """Give keyword arguments as JSON gives them back."""
    name = "ValidationTaskConfig.fn_kwargs"
    if fn_kwargs is None:
        return {}
    require_type(name, fn_kwargs, Mapping)
    assert isinstance(fn_kwargs, Mapping)
    for key in fn_kwargs:
        require_type(f"{name}: a key", key, str)
    try:
        plain: dict[str, object] = json.loads(json.dumps(dict(fn_kwargs), allow_nan=False))
    except (TypeError, ValueError) as error:
        raise TypeError(
            f"{name} must be JSON-able, since it is kept with the checkpoint: {error}; "
            f"found {fn_kwargs!r}"
        ) from None
    return plain


def _placeholder_task() -> None:
    """Stand for the task while its options are checked."""
