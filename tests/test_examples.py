"""Tests that run each example as a user would."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import ray

from tests.forks import Forks

EXAMPLES = Path(__file__).parents[1] / "examples"
PNG = b"\x89PNG"


@pytest.fixture(scope="module")
def forks(ray_cluster: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    home = str(tmp_path_factory.mktemp("home"))  # where libraries look when they are imported
    forks = Forks(**{**os.environ, "HOME": home})
    yield forks
    forks.close()


@pytest.fixture
def run(tmp_path: Path, forks: Forks) -> Callable[..., str]:
    """Return a function that runs a script in the temporary directory and returns its output.

    The script uses the tests' Ray. tests/train/test_wheel.py has a script that starts Ray.
    """
    tests_ray = {"RAY_ADDRESS": ray.get_runtime_context().gcs_address}
    token = Path.home() / ".ray" / "auth_token"
    if token.exists():  # Ray would look for it in the other home
        tests_ray["RAY_AUTH_TOKEN_PATH"] = str(token)

    def run(script: str, *arguments: str) -> str:
        environment = {
            **os.environ,
            **tests_ray,
            "HOME": str(tmp_path),
            "DRAWBAR_STORAGE": str(tmp_path / "runs"),
        }
        return forks.run(str(EXAMPLES / script), *arguments, folder=tmp_path, **environment)

    return run


@pytest.mark.nightly  # README.md has the same script, which tests/test_docs.py runs
def test_example_quickstart_trains(run: Callable[..., str], tmp_path: Path) -> None:
    output = run("quickstart.py")
    assert float(re.findall(r"'loss': ([\d.e-]+)", output)[0]) < 0.5
    assert str(tmp_path / "runs") in output


@pytest.mark.nightly
def test_example_pytorch_resumes_in_local_mode(run: Callable[..., str], tmp_path: Path) -> None:
    first = run("pytorch.py", "--epochs", "6")
    assert float(re.findall(r"'accuracy': ([\d.]+)", first)[0]) > 0.9
    assert (tmp_path / "runs/digits/curves.png").read_bytes().startswith(PNG)
    again = run("pytorch.py", "--epochs", "7", "--num-workers", "0")
    assert "'epoch': 6" in again
    assert "checkpoint_000006" in again


@pytest.mark.nightly
def test_example_lightning_resumes_in_local_mode(run: Callable[..., str]) -> None:
    first = run("lightning_digits.py")
    assert max(map(float, re.findall(r"accuracy ([\d.]+)", first))) > 0.95
    again = run("lightning_digits.py", "--epochs", "9", "--num-workers", "0")
    assert "last-step=229" in again  # 8 epochs of 23 steps, and one of 45 on one worker
    assert Path(again.split()[-1]).exists()


@pytest.mark.nightly
def test_example_lightning_from_driver_trains(run: Callable[..., str], tmp_path: Path) -> None:
    output = run("lightning_from_driver.py")
    assert float(re.findall(r"accuracy: ([\d.]+)", output)[0]) > 0.9
    assert Path(re.findall(r"best checkpoint: (.*)", output)[0]).is_relative_to(tmp_path)
    assert "the weights are here: 0 is a 0" in output


@pytest.mark.nightly
def test_example_transformers_resumes_in_local_mode(run: Callable[..., str]) -> None:
    first = run("transformers_gpt.py", "--steps", "50")
    assert float(re.findall(r"'eval_loss': ([\d.]+)", first)[-1]) < 4
    assert "class datetime(" in first
    again = run("transformers_gpt.py", "--steps", "60", "--num-workers", "0")
    assert "'step': 60" in again


@pytest.mark.nightly
def test_example_accelerate_resumes_in_local_mode(run: Callable[..., str]) -> None:
    first = run("accelerate_digits.py", "--epochs", "6")
    assert float(re.findall(r"'accuracy': ([\d.]+)", first)[0]) > 0.9
    again = run("accelerate_digits.py", "--epochs", "7", "--num-workers", "0")
    assert "'epoch': 6" in again
    assert "checkpoint_000006" in again


@pytest.mark.nightly
def test_example_jax_resumes_in_local_mode(run: Callable[..., str], tmp_path: Path) -> None:
    first = run("jax_digits.py", "--epochs", "4")
    assert float(re.findall(r"'accuracy': ([\d.]+)", first)[0]) > 0.93
    assert (tmp_path / "runs/digits-jax/curves.png").read_bytes().startswith(PNG)
    again = run("jax_digits.py", "--epochs", "5", "--num-workers", "0")
    assert "'epoch': 4" in again
    assert "checkpoint_000004" in again


@pytest.mark.nightly
def test_example_keras_resumes_with_another_backend(
    run: Callable[..., str], tmp_path: Path
) -> None:
    first = run("keras_digits.py")
    assert float(re.findall(r"'val_accuracy': ([\d.]+)", first)[0]) > 0.9
    assert (tmp_path / "runs/digits-keras/curves.png").read_bytes().startswith(PNG)
    again = run("keras_digits.py", "--epochs", "9", "--backend", "jax", "--num-workers", "0")
    assert "checkpoint_000008" in again


@pytest.mark.nightly
def test_example_tensorflow_resumes_in_local_mode(run: Callable[..., str], tmp_path: Path) -> None:
    first = run("tensorflow_loop.py", "--epochs", "10")
    assert float(re.findall(r"'accuracy': ([\d.]+)", first)[0]) > 0.93
    assert (tmp_path / "runs/digits-tensorflow/curves.png").read_bytes().startswith(PNG)
    again = run("tensorflow_loop.py", "--epochs", "11", "--num-workers", "0")
    assert "'epoch': 10" in again
    assert "checkpoint_000010" in again


@pytest.mark.nightly
def test_example_xgboost_trains(run: Callable[..., str], tmp_path: Path) -> None:
    output = run("xgboost_trees.py")
    assert float(re.findall(r"'validation-error': ([\d.]+)", output)[0]) < 0.06
    figure = tmp_path / "runs/cancer/learning.png"
    assert figure.read_bytes().startswith(PNG)


@pytest.mark.nightly
def test_example_lightgbm_trains(run: Callable[..., str], tmp_path: Path) -> None:
    output = run("lightgbm_trees.py", "--rounds", "30")
    assert float(re.findall(r"'validation-multi_error': ([\d.]+)", output)[0]) < 0.06
    figure = tmp_path / "runs/digits-trees/learning.png"
    assert figure.read_bytes().startswith(PNG)


@pytest.mark.nightly
def test_example_ray_data_trains(run: Callable[..., str], tmp_path: Path) -> None:
    output = run("ray_data.py", "--num-workers", "2", "--epochs", "8")
    assert float(re.findall(r"'accuracy': ([\d.]+)", output)[0]) > 0.9
    assert "rows of each epoch: [454, 454, 454, 454, 454, 454, 454, 454]" in output  # of 455
    assert (tmp_path / "runs/tumours/curves.png").read_bytes().startswith(PNG)


@pytest.mark.nightly
def test_example_tune_runs_a_sweep(run: Callable[..., str], tmp_path: Path) -> None:
    output = run("tune_digits.py", "--trials", "2")
    assert float(re.findall(r"best: ([\d.]+)", output)[0]) > 0.5  # two guesses
    assert (tmp_path / "runs/digits-sweep/sweep.png").read_bytes().startswith(PNG)
