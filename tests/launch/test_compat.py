"""Private functions of Accelerate: tests fail when Accelerate changes what `_compat` uses."""

from __future__ import annotations

import argparse
import difflib
import os
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.launch import launch_command_parser

from drawbar.cli import _accelerate, _torchrun
from drawbar.launch._compat import read_options

OWN_FLAGS = {"--help", "-h", "--module", "-m", "--no-python"}
"""Options of Accelerate that Drawbar or torchrun has, too."""

NOT_COMBINED = {
    "--config-file",
    "--cpu",
    "--multi-gpu",
    "--no-python",
    "--tpu",
    "--tpu-cluster",
    "--no-tpu-cluster",
    "--use-deepspeed",
    "--use-megatron-lm",
}
"""Options that need files or devices, or that exclude others."""


def make_options() -> dict[str, argparse.Action]:
    """Return the options of Accelerate by their names with hyphens."""
    actions = launch_command_parser()._actions
    return {name.replace("_", "-"): action for action in actions for name in action.option_strings}


def make_value(name: str, action: argparse.Action) -> str:
    if action.choices:
        return str(next(iter(action.choices)))
    if name == "--fp8-override-linear-precision":
        return "true,false,true"
    return "2" if action.type in (int, float) else "true"


def test_flags_are_options_without_value() -> None:
    options = make_options()
    flags = {name for name, action in options.items() if action.nargs == 0} - OWN_FLAGS
    assert flags <= _accelerate.FLAGS
    assert (options.keys() - flags).isdisjoint(_accelerate.FLAGS)


def test_names_are_not_similar_to_other_options() -> None:
    own = {"--use-gpu", "--address", "--no-progress", "--max-failures", "--cpus-per-worker"}
    own |= {*_torchrun.ONLY_TORCHRUN, *_torchrun.SHARED}
    names = make_options().keys() - own
    cutoff = _accelerate._IS_TYPO
    assert [name for name in names if difflib.get_close_matches(name, own, cutoff=cutoff)] == []
    assert [
        name for name in names - _accelerate.FLAGS if any(option.startswith(name) for option in own)
    ] == []


def test_ignored_options_exist() -> None:
    assert _accelerate.IGNORED.keys() <= make_options().keys()


def test_all_options_together_are_accepted(monkeypatch: pytest.MonkeyPatch) -> None:
    options = [
        name if action.nargs == 0 else f"{name}={make_value(name, action)}"
        for name, action in make_options().items()
        if name not in NOT_COMBINED | OWN_FLAGS
    ]
    settings = read_options([*options, "--fsdp-version=2", "--mixed-precision=bf16"])
    assert settings["num_processes"] == settings["num_machines"] == 2
    assert settings["is_distributed"]
    env = settings["env"]
    assert env["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert env["FSDP_VERSION"] == "2"
    assert env["PARALLELISM_CONFIG_TP_SIZE"] == "2"
    assert "MASTER_PORT" not in env
    assert settings["device_env"] == {"CUDA_VISIBLE_DEVICES": "true"}
    assert settings["settings"]["machine_rank"] == 2


@pytest.mark.parametrize(
    ("config", "options", "expected"),
    [
        ("distributed_type: MULTI_CPU, num_processes: 3, use_cpu: true", [], (3, True, True)),
        ("distributed_type: 'NO', num_processes: 3", [], (1, False, False)),
        ("distributed_type: 'NO', num_processes: 3", ["--num_processes=2"], (2, True, False)),
        ("distributed_type: FSDP, num_processes: 1", [], (1, True, False)),
        ("distributed_type: MULTI_GPU, num_processes: 2", ["--cpu"], (2, True, True)),
    ],
)
def test_config_file_sets_processes(
    config: str, options: list[str], expected: Any, tmp_path: Path
) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{{num_machines: 1, {config}}}")
    settings = read_options([f"--config_file={path}", *options])
    found = [settings[name] for name in ("num_processes", "is_distributed", "use_cpu")]
    assert (*found,) == expected
    assert settings["config_file"] == str(path)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            "compute_environment: AMAZON_SAGEMAKER, distributed_type: DATA_PARALLEL, "
            "ec2_instance_type: x, iam_role_name: y",
            "Amazon SageMaker",
        ),
        ("distributed_type: XLA, num_processes: 1", "does not support TPUs"),
        ("distributed_type: 'NO', no_such_key: 1", "no_such_key"),
    ],
)
def test_config_file_for_other_launcher_raises(config: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(f"{{{config}}}")
    with pytest.raises(ValueError, match=message):
        read_options([f"--config_file={path}"])


def test_unknown_option_is_returned() -> None:
    settings = read_options(["--no_such_option=1"])
    assert settings["unknown_options"] == ["--no_such_option=1"]
    assert "--num_processes" in settings["option_names"]


def test_deepspeed_fields_of_config_file_are_in_environment(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(
        "{distributed_type: DEEPSPEED, num_processes: 2, num_machines: 1, mixed_precision: bf16, "
        "deepspeed_config: {zero_stage: 2, gradient_clipping: 0.5}}"
    )
    env = read_options([f"--config_file={path}"])["env"]
    assert env["ACCELERATE_CONFIG_DS_FIELDS"] == "zero_stage,gradient_clipping,mixed_precision"
    assert env["ACCELERATE_GRADIENT_CLIPPING"] == "0.5"
    assert os.environ.get("ACCELERATE_USE_DEEPSPEED") is None
