"""What a training function calls: a model whose replicas stay equal, and how far the run has come.

With JAX, Keras itself computes over all workers. With PyTorch and TensorFlow each worker has a
replica. After rank 0's weights were copied to all, every step begins and ends with equal ones: the
gradients are averaged before the optimizer gets them, and so is, in the same collective, what
layers such as BatchNormalization have gathered. Metrics are added up when they are read: at the end
of an epoch and of `evaluate`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from drawbar.keras._backend import backend_here
from drawbar.keras._report import MODEL, read_progress
from drawbar.keras._totals import Totals, totals_of
from drawbar.train import collective, get_checkpoint, get_context

Model = TypeVar("Model")


def prepare_model(model: Model) -> Model:
    """Have a model trained by all workers together: its replicas equal, its metrics global.

    Call it once, on every rank, when the model is compiled. With one worker it changes nothing.

    Args:
        model: A model of Keras 3, compiled and built: its first layer knows the shape of its input,
            or `model.build` was called.

    Returns:
        The same model.

    Raises:
        ValueError: The model is not compiled, or not built.
        RuntimeError: Called outside a training function.
    """
    anything: Any = model
    if not getattr(anything, "compiled", False) or not anything.built:
        missing = "compiled" if anything.built else "built"
        raise ValueError(
            f"the model {anything.name!r} is not {missing}; prepare_model takes one that has a "
            "keras.Input, or whose build() was called, after its compile()"
        )
    anything.fit = _fit_in_order(anything.fit)
    if get_context().get_world_size() == 1:
        return model
    backend = backend_here()
    if backend == "jax":
        anything.predict = _LocalPredict(anything)
        return model
    if backend == "tensorflow":
        anything.jit_compile = False  # XLA knows no collectives of TensorFlow's
    totals = totals_of(backend)
    anything.optimizer.build(anything.trainable_variables)
    _copy_rank_zero([*anything.variables, *anything.optimizer.variables], totals)
    _average_steps(anything, totals)
    _add_metrics_up(anything, totals)
    return model


def _fit_in_order(fit: Callable[..., Any]) -> Callable[..., Any]:
    """Have Keras not shuffle the batches of `prepare_dataset`, by numbers that each rank draws."""

    def fit_in_order(*args: Any, **kwargs: Any) -> Any:
        from drawbar.keras._shared_batches import SharedBatches

        data = args[0] if args else kwargs.get("x")
        in_order = {"shuffle": False} if isinstance(data, SharedBatches) else {}
        return fit(*args, **{**kwargs, **in_order})

    return fit_in_order


class _LocalPredict:
    """`predict` on this worker alone, which each does for all that it is given.

    JAX would take what every worker gives for its part of one batch, and leave the results apart.
    """

    def __init__(self, model: Any) -> None:
        self._model = model

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        import keras

        distribution = keras.distribution.distribution()
        keras.distribution.set_distribution(None)
        try:
            local = keras.models.clone_model(self._model)
            local.set_weights(self._model.get_weights())
            return local.predict(*args, **kwargs)
        finally:
            keras.distribution.set_distribution(distribution)


def _copy_rank_zero(variables: list[Any], totals: Totals) -> None:
    leads = get_context().get_world_rank() == 0
    floats = [each for each in variables if "float" in each.dtype]
    for variable, value in zip(
        floats, totals([each.value * float(leads) for each in floats]), strict=True
    ):
        variable.assign(value)
    others = [each for each in variables if "float" not in each.dtype]  # counters and seeds
    values = collective.broadcast_from_rank_zero([each.numpy() for each in others])
    for variable, value in zip(others, values, strict=True):
        variable.assign(value)


def _average_steps(model: Any, totals: Totals) -> None:
    apply, size = model.optimizer.apply, get_context().get_world_size()

    def apply_averaged(grads: Any, trainable_variables: Any = None) -> None:
        gathered = _gathered_by_layers(model)
        given = [gradient for gradient in grads if gradient is not None]
        sums = iter(totals([*given, *(each.value for each in gathered)]))
        averaged = [None if gradient is None else next(sums) / size for gradient in grads]
        apply(averaged, trainable_variables)
        for variable, value in zip(gathered, sums, strict=True):
            variable.assign(value / size)

    model.optimizer.apply = apply_averaged


def _gathered_by_layers(model: Any) -> list[Any]:
    """Give what layers change by themselves, without the weights of those that are frozen."""
    return [
        variable
        for layer in model._flatten_layers()
        if layer.trainable
        for variable in layer._non_trainable_variables
        if "float" in variable.dtype
    ]


def _add_metrics_up(model: Any, totals: Totals) -> None:
    result = model._get_metrics_result_or_logs

    def result_of_all(logs: Any) -> Any:
        variables = model.metrics_variables
        own = [variable.numpy() for variable in variables]
        for variable, value in zip(
            variables, totals([each.value for each in variables]), strict=True
        ):
            variable.assign(value)
        try:
            return result(logs)
        finally:
            for variable, value in zip(variables, own, strict=True):
                variable.assign(value)

    model._get_metrics_result_or_logs = result_of_all


def load_state(model: Any) -> int:
    """Load the newest checkpoint of a `ReportCheckpointCallback` into a model and its optimizer.

    All ranks call it, before or after `prepare_model`.

    Args:
        model: The model that was saved, compiled and built.

    Returns:
        The epoch to go on with, for `fit(initial_epoch=...)`; 0 if the run has no checkpoint yet. A
        checkpoint from the middle of an epoch gives that epoch, which begins anew.

    Raises:
        FileNotFoundError: The checkpoint holds no model of that callback.
    """
    checkpoint = get_checkpoint()
    if checkpoint is None:
        return 0
    with checkpoint.as_directory() as folder:
        path = Path(folder, MODEL)
        if not path.exists():
            raise FileNotFoundError(
                f"{checkpoint} has no file {MODEL!r}, which ReportCheckpointCallback saves"
            )
        if getattr(model, "optimizer", None) is not None:
            model.optimizer.build(model.trainable_variables)
        model.load_weights(str(path))
        return read_progress(Path(folder)).epochs
