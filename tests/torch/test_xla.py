"""Tests of TorchXLAConfig on a machine without an XLA device."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from drawbar.torch import TorchConfig, TorchTrainer, TorchXLAConfig
from drawbar.torch._xla import compile_graphs
from drawbar.train import ScalingConfig

without_xla = pytest.mark.skipif(
    importlib.util.find_spec("torch_xla") is not None,
    reason="needs an environment without torch_xla",
)


def test_xla_config_has_backend_xla() -> None:
    config = TorchXLAConfig(timeout_s=60)
    assert isinstance(config, TorchConfig)
    assert config.resolve_backend(has_gpus=False) == "xla"
    assert not config.neuron_parallel_compile


@without_xla
def test_xla_config_without_torch_xla_names_package() -> None:
    trainer = TorchTrainer(
        print, torch_config=TorchXLAConfig(), scaling_config=ScalingConfig(num_workers=0)
    )
    with pytest.raises(ImportError, match=r"needs torch_xla.*pip install torch-neuronx"):
        trainer.fit()


@pytest.fixture
def neuron_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Put a `neuron_parallel_compile` of the given script on the PATH; its arguments are logged."""

    def install(script: str) -> Path:
        log, command = tmp_path / "log", tmp_path / "neuron_parallel_compile"
        command.write_text(f'#!/bin/sh\necho "$@" > {log}\n{script}\n')
        command.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
        return log

    return install


def test_compile_graphs_runs_documented_command(
    neuron_command: Callable[[str], Path],
) -> None:
    log = neuron_command("exit 0")
    compile_graphs()
    assert log.read_text().startswith("--command compile")


def test_compile_graphs_failure_raises(neuron_command: Callable[[str], Path]) -> None:
    neuron_command("exit 3")
    with pytest.raises(RuntimeError, match=r"neuron_parallel_compile .* exited with code 3"):
        compile_graphs()


def test_compile_graphs_without_compiler_names_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"not on the worker's PATH.*pip install torch-neuronx"):
        compile_graphs()
