"""prepare_model: train a model on all workers together."""

from __future__ import annotations

from typing import Any, TypeVar

from drawbar.keras._allreduce import make_allreduce
from drawbar.keras._backend import current_keras_backend
from drawbar.keras._compat import is_replaced, replace_attribute
from drawbar.keras._progress import identity_allreduce, model_state
from drawbar.train import get_context

Model = TypeVar("Model")


def prepare_model(model: Model, *, sync_batch_norm: bool = False) -> Model:
    """Train one model on all workers: keep its replicas equal and its metrics global.

    Call it on every rank after the model is compiled. The model may be compiled again afterwards.
    With one worker, it only makes `fit` resume from the checkpoint that `load_state` loads.

    Args:
        model: A compiled and built model of Keras 3: its first layer knows the shape of its input,
            or `model.build` was called.
        sync_batch_norm: Whether `BatchNormalization` layers normalize by the rows of all workers,
            as in one process, at the cost of two collectives per layer and step. By default, each
            worker normalizes by its own rows. Layers with `synchronized=True` are always
            synchronized, and so are all layers with JAX.

    Returns:
        The same model.

    Raises:
        ValueError: The model is not compiled or not built, or its loss is a sum over rows
            (`reduction="sum"`) and its backend averages gradients.
        RuntimeError: Called outside a training function.

    Example:
        ```python
        model = prepare_model(make_model(), sync_batch_norm=True)
        ```
    """
    untyped_model: Any = model
    if not getattr(untyped_model, "compiled", False) or not untyped_model.built:
        missing = "compiled" if untyped_model.built else "built"
        raise ValueError(
            f"prepare_model() needs a built and compiled model, but {untyped_model.name!r} is not "
            f"{missing}. Add a keras.Input or call build(), and call compile()."
        )
    from drawbar.keras._batch_norm import synchronize_batch_norm
    from drawbar.keras._fit import make_distributed_predict, make_resumable_fit
    from drawbar.keras._replicas import broadcast_weights, require_mean_losses, synchronize_replicas

    state, backend, size = (
        model_state(model),
        current_keras_backend(),
        get_context().get_world_size(),
    )
    has_replicas = size > 1 and backend != "jax"  # JAX computes one model over all workers
    if has_replicas:
        require_mean_losses(untyped_model)
        broadcast_weights(untyped_model, make_allreduce(backend))
    if is_replaced(model, "fit"):
        return model
    replace_attribute(model, "fit", make_resumable_fit(untyped_model, untyped_model.fit))
    if size > 1:
        predict = make_distributed_predict(untyped_model, untyped_model.predict)
        replace_attribute(model, "predict", predict)
    state.allreduce = make_allreduce(backend) if has_replicas else identity_allreduce
    if has_replicas:
        synchronize_replicas(untyped_model, state.allreduce)
        synchronize_batch_norm(untyped_model, state.allreduce, all_layers=sync_batch_norm)
    return model
