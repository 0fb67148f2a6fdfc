"""Pure decisions about options of `accelerate launch`, without Accelerate."""

from __future__ import annotations

import pytest

from drawbar.cli._accelerate import make_accelerate_env, mark_accelerate_options
from drawbar.cli._output import CommandError
from drawbar.launch import AccelerateLaunchConfig
from drawbar.train import ScalingConfig

OPTION = "--accelerate-option"


def test_mark_accelerate_options_keeps_own_options_and_script_arguments() -> None:
    arguments = [
        *("--num_processes", "2", "--use_fsdp", "--name", "run", "-q", "--fsdp-version=2"),
        *("-m", "package.train", "--mixed_precision", "bf16"),
    ]
    assert mark_accelerate_options(arguments, {"--name", "-m"}, {"-m"}) == [
        *(f"{OPTION}=--num_processes=2", f"{OPTION}=--use_fsdp", "--name", "run", f"{OPTION}=-q"),
        *(f"{OPTION}=--fsdp-version=2", "-m", "package.train", "--mixed_precision", "bf16"),
    ]


def test_mark_accelerate_options_with_mistyped_own_option_keeps_it() -> None:
    arguments = ["--num-worker", "2", "-t3", "train.py"]
    assert mark_accelerate_options(arguments, {"--num-workers"}, set()) == arguments


@pytest.mark.parametrize(
    ("config", "scaling", "uses_ray", "expected", "warning"),
    [
        (
            AccelerateLaunchConfig(2, {"A": "1"}),
            ScalingConfig(num_workers=2),
            False,
            {"A": "1", "ACCELERATE_USE_CPU": "true", "B": "2"},
            "",
        ),
        (
            AccelerateLaunchConfig(2, {"ACCELERATE_USE_FSDP": "true"}),
            ScalingConfig(num_workers=2, use_gpu=True),
            True,
            {"ACCELERATE_USE_FSDP": "true", "B": "2"},
            "",
        ),
        (
            AccelerateLaunchConfig(2, {"ACCELERATE_USE_FSDP": "true"}),
            ScalingConfig(num_workers=2),
            False,
            {"ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true", "B": "2"},
            "Ignoring FSDP: Accelerate does not use it on CPUs.",
        ),
        (
            AccelerateLaunchConfig(2, {}, device_env={"CUDA_VISIBLE_DEVICES": "0,1"}),
            ScalingConfig(num_workers=2, use_gpu=True),
            True,
            {"B": "2"},
            "Ignoring --gpu-ids: Ray assigns the GPUs of each node.",
        ),
        (
            AccelerateLaunchConfig(2, {"A": "1"}, has_accelerator=True),
            ScalingConfig(num_workers=2),
            False,
            {"A": "1", "B": "2"},
            "",
        ),
    ],
)
def test_make_accelerate_env_adds_variables_and_warns(
    config: AccelerateLaunchConfig,
    scaling: ScalingConfig,
    uses_ray: bool,
    expected: dict[str, str],
    warning: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    env = make_accelerate_env(config, {"B": "2"}, scaling, uses_ray=uses_ray, starts_ray=False)
    assert env == expected
    err = capsys.readouterr().err
    assert warning in err
    assert bool(warning) == bool(err)


def test_config_of_several_machines_becomes_torchruns_rendezvous() -> None:
    settings: dict[str, str | int | float] = {
        "main_process_ip": "10.0.0.1",
        "main_process_port": 29511,
        "machine_rank": 1,
    }
    config = AccelerateLaunchConfig(4, {}, num_machines=2, settings=settings)
    assert config.to_torchrun() == ("2", "2")
    expected = {"--rdzv-endpoint": "10.0.0.1:29511", "--node-rank": "1"}
    assert config.to_torchrun_rendezvous() == expected
    assert AccelerateLaunchConfig(4, {}, settings=settings).to_torchrun_rendezvous() == {}


def test_make_accelerate_env_of_single_process_removes_ranks() -> None:
    config = AccelerateLaunchConfig(1, {"A": "1"}, is_distributed=False)
    env = make_accelerate_env(
        config, {}, ScalingConfig(num_workers=1), uses_ray=False, starts_ray=False
    )
    assert env["A"] == "1"
    assert env["RANK"] is env["TORCHELASTIC_RUN_ID"] is None


def test_make_accelerate_env_of_machines_without_ray_raises() -> None:
    config = AccelerateLaunchConfig(4, {}, num_machines=2)
    with pytest.raises(CommandError, match="num_machines=2 needs --main_process_ip"):
        make_accelerate_env(
            config, {}, ScalingConfig(num_workers=4), uses_ray=False, starts_ray=False
        )
