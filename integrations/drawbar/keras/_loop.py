"""What a training function calls: a model that all workers train, and how far the run has come."""

from __future__ import annotations

from pathlib import Path
from typing import Any, TypeVar

from drawbar.keras._backend import backend_here
from drawbar.keras._progress import Progress, restore_seeds, training_of
from drawbar.keras._report import MODEL
from drawbar.keras._totals import totals_of
from drawbar.train import get_context
from drawbar.train.backend import common_checkpoint

Model = TypeVar("Model")


def prepare_model(model: Model) -> Model:
    """Have a model trained by all workers together: its replicas equal, its metrics global.

    Call it on every rank when the model is compiled; it may be compiled anew afterwards. With one
    worker it only has `fit` go on where the checkpoint was that `load_state` loads.

    Args:
        model: A model of Keras 3, compiled and built: its first layer knows the shape of its input,
            or `model.build` was called.

    Returns:
        The same model.

    Raises:
        ValueError: The model is not compiled, or not built; or its loss is a sum over rows
            (`reduction="sum"`), and its backend averages gradients.
        RuntimeError: Called outside a training function.
    """
    anything: Any = model
    if not getattr(anything, "compiled", False) or not anything.built:
        missing = "compiled" if anything.built else "built"
        raise ValueError(
            f"the model {anything.name!r} is not {missing}; prepare_model takes one that has a "
            "keras.Input, or whose build() was called, after its compile()"
        )
    from drawbar.keras._fit import fit_on, predict_for_all
    from drawbar.keras._replicas import copy_rank_zero, keep_equal, require_means

    training, backend, size = training_of(model), backend_here(), get_context().get_world_size()
    has_replicas = size > 1 and backend != "jax"  # with JAX Keras computes over all workers
    if has_replicas:
        require_means(anything)
        copy_rank_zero(anything, totals_of(backend))
    if training.is_prepared:
        return model
    training.is_prepared = True
    anything.fit = fit_on(anything, anything.fit)
    if size > 1:
        anything.predict = predict_for_all(anything, anything.predict)
    if has_replicas:
        training.totals = totals_of(backend)
        keep_equal(anything, training.totals)
    return model


def load_state(model: Any) -> int:
    """Load the newest checkpoint of a `ReportCheckpointCallback` into a model and its optimizer.

    All ranks call it, before or after `prepare_model`.

    Args:
        model: The model that was saved, compiled and built.

    Returns:
        The epoch to go on with, for `fit(initial_epoch=...)`; 0 if the run has no checkpoint yet.
        From the middle of an epoch the `fit` of a prepared model goes on there, with the metrics
        gathered so far, if its data has a known number of batches; otherwise that epoch begins
        anew. Where a callback had stopped this run's training it trains no more.

    Raises:
        FileNotFoundError: The checkpoint holds no model of that callback.
    """
    checkpoint = common_checkpoint()
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
        progress = Progress.read(Path(folder))
    restore_seeds(model, progress)
    training_of(model).begun = progress
    return progress.epochs
