"""Places of Ray Train's names in Drawbar, and notes for names without one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from drawbar.cli._migrate.public_names import public_names
from drawbar.train.backend import explain_missing_name, find_public_module

OLD, NEW, AIR = "ray.train", "drawbar.train", "ray.air"
_TUNE_CALLBACK = "ray.tune.integration.ray_train"
_RENAMED_MODULES = {
    _TUNE_CALLBACK: "drawbar.tune",
    f"{AIR}.integrations.keras": f"{NEW}.tensorflow.keras",
}
_TRACKERS = {"mlflow": "MLflow", "wandb": "WandB"}


def is_submodule(module: str, parent: str) -> bool:
    """Return whether a module is another one or below it."""
    return f"{module}.".startswith(f"{parent}.")


def is_train_module(path: str) -> bool:
    """Return whether a path of Ray Train is a module in Drawbar, maybe under another path."""
    return is_submodule(path, OLD) and public_names(rename_module(path)) is not None


def rename_module(path: str, names: Iterable[str] = ()) -> str:
    """Return the public module of Drawbar for a module of Ray Train.

    Args:
        path: Path below `ray.train`. Scripts also use internal ones, such as
            `ray.train._internal.storage`.
        names: Names imported from it. If Drawbar does not have the module, but `drawbar.train` has
            all of these names, they are imported from there.
    """
    new = find_public_module(NEW + path.removeprefix(OLD))
    is_in_train = names and set(names) <= (public_names(NEW) or set())
    return NEW if is_in_train and public_names(new) is None else new


def rename_other_module(path: str, names: list[str]) -> str | None:
    """Return the module of Drawbar for a module of Ray AIR or Ray Tune; None if there is none."""
    if path in _RENAMED_MODULES:
        return _RENAMED_MODULES[path]
    known = {*(public_names(NEW) or ()), "session"}
    return NEW if is_submodule(path, AIR) and set(names) <= known else None


def explain_air_import(path: str, names: list[str]) -> str:
    """Return the note for an import from Ray AIR that is not replaced."""
    tracker = _TRACKERS.get(path.removeprefix(f"{AIR}.integrations."))
    if tracker is not None:
        return f"use RunConfig(callbacks=[drawbar.trackers.{tracker}()]) instead of {path}"
    missing = sorted(set(names) - (public_names(NEW) or set()))
    reasons = [f"{NEW} has no {name}" for name in missing] or [f"its names are in {NEW}"]
    return f"{path}: {', '.join(reasons)}"


def explain_missing_names(module: str, names: Iterable[str]) -> Iterator[str]:
    """Yield a note for each of these names that a module of Drawbar does not have."""
    existing = public_names(module)
    if existing is None:
        yield _explain_missing_module(module)
        return
    for name in names:
        path = f"{module}.{name}"
        if name not in existing and name != "*" and find_public_module(path) == path:
            yield explain_missing_name(module, name) or f"{module} has no {name}"


def _explain_missing_module(module: str) -> str:
    parts = module.split(".")
    for index, part in enumerate(parts):
        if reason := explain_missing_name(".".join(parts[:index]), part):
            return reason
    return f"module {module} does not exist; import from {NEW}"
