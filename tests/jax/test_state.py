"""report_state and load_state: which states are saved and loaded, and which raise an error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from drawbar import train
from drawbar.jax import JaxTrainer, load_state, report_state
from drawbar.train import RunConfig, ScalingConfig
from tests.stops import stop_run


def run(path: Path, train_func: Any) -> Any:
    trainer = JaxTrainer(
        train_func,
        scaling_config=ScalingConfig(num_workers=0),
        run_config=RunConfig(name="run", storage_path=path),
    )
    return trainer.fit().return_value


SAVED = {
    "numpy": np.ones(4),
    "array": jnp.ones(4),
    "count": 3,
    "float": 2.5,
    "none": None,
    "empty": {},
    "raw": jax.random.PRNGKey(0),
    "key": jax.random.key(1),
    "layers": [np.int32(1), (jnp.zeros(2), None)],
    "optimizer": optax.adam(0.1).init({"w": jnp.ones(2)}),
}

MISMATCHES: dict[str, tuple[dict[str, Any], str]] = {
    "larger NumPy array": (
        {"numpy": np.ones(6)},
        r"'numpy' was saved as float64\[4\], .* float64\[6\]",
    ),
    "smaller NumPy array": ({"numpy": np.ones(2)}, r"'numpy' .* but `like` has float64\[2\]"),
    "other rank": ({"array": jnp.ones((4, 1))}, r"'array' .* float32\[4, 1\]"),
    "None for array": ({"array": None}, r"'array' was saved as float32\[4\], but `like` has None"),
    "array for None": (
        {"none": np.ones(2)},
        r"'none' was saved as None, but `like` has float64\[2\]",
    ),
    "container for None": ({"none": {}}, "'none' was saved as None, .* an empty container"),
    "None for container": ({"empty": None}, "'empty' was saved as an empty container, .* None"),
    "typed for raw key": (
        {"raw": jax.random.key(0)},
        r"'raw' was saved as uint32\[2\], .* key<fry>",
    ),
    "raw for typed key": (
        {"key": jax.random.PRNGKey(0)},
        r"'key' was saved as key<fry>\[\], .* uint32",
    ),
    "other key type": ({"key": jax.random.key(0, impl="rbg")}, r"'key' .* but `like` has key<rbg>"),
    "other number of keys": ({"key": jax.random.split(jax.random.key(0))}, r"has key<fry>\[2\]"),
    "integer for float": ({"float": 1}, r"'float' was saved as float64\[\], but `like` has int64"),
    "new name": ({"new": 1}, r"'new' was not saved, but `like` has int64\[\]"),
    "other container": ({"layers": [1]}, r"'layers.1.0' was saved as float32\[2\], .* not have it"),
}


def test_stop_saves_state_of_this_step_and_resumes_there(tmp_path: Path) -> None:
    def function() -> tuple[int, float]:
        state, start = {"sum": jnp.zeros(())}, 0
        if (loaded := load_state(state)) is not None:
            state, start = loaded[0], loaded[1]["step"] + 1
        for step in range(start, 10):
            state = {"sum": state["sum"] + step}
            if step == 3:
                stop_run()
            if train.should_checkpoint():
                report_state(state, {"step": step})
        return start, float(state["sum"])

    run(tmp_path, function)
    assert run(tmp_path, function) == (4, 45.0)


def test_load_state_with_other_structure_raises(tmp_path: Path) -> None:
    def save_and_load() -> list[str]:
        report_state(SAVED, {"step": 1})
        errors = []
        for changes, message in MISMATCHES.values():
            with pytest.raises(ValueError, match=message) as error:
                load_state({**SAVED, **changes})
            errors.append(str(error.value))
        with pytest.raises(ValueError, match="'count' was saved as") as error:
            load_state({name: value for name, value in SAVED.items() if name != "count"})
        assert "but `like` does not have it. Pass a state like the saved" in str(error.value)
        return errors

    assert len(run(tmp_path, save_and_load)) == len(MISMATCHES)


def test_load_state_converts_numbers_to_wider_kinds_and_other_precision(tmp_path: Path) -> None:
    def save_and_load() -> Any:
        report_state(SAVED, {"step": 1})
        like = {**SAVED, "array": jnp.ones(4, jnp.bfloat16), "count": 0.0, "float": jnp.zeros(())}
        return load_state(like)

    state, metrics = run(tmp_path, save_and_load)
    assert metrics == {"step": 1}
    assert repr(jax.tree.structure(state)) == repr(jax.tree.structure(SAVED))
    assert state["array"].dtype == jnp.bfloat16
    assert (state["count"], float(state["float"])) == (3.0, 2.5)
    assert jax.random.key_data(state["key"]).tolist() == [0, 1]


def test_load_state_without_structure_file_loads_older_checkpoint(tmp_path: Path) -> None:
    def save_and_load() -> Any:
        report_state(SAVED, {"step": 1})
        (file,) = tmp_path.glob("run/*/structure.json")
        file.unlink()
        return load_state(SAVED)

    state, metrics = run(tmp_path, save_and_load)
    assert metrics == {"step": 1}
    assert state["numpy"].tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize(
    "state",
    [
        {"a.b": np.ones(2), "a": {"b": np.zeros(2)}},
        {"a": [np.ones(2)], "a.0": 1},
        {"a": {"b.c": 1, "b": {"c": None}}},
    ],
)
def test_report_state_with_same_names_raises(tmp_path: Path, state: Any) -> None:
    def save() -> str:
        with pytest.raises(ValueError, match="Two leaves of the state have the name 'a") as error:
            report_state(state, {})
        return str(error.value)

    assert "Rename the key [" in run(tmp_path, save)
