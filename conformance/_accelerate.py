"""Run the test scripts of Accelerate with `drawbar launch` in place of `accelerate launch`.

The scripts are part of the installed package. The options are those that Accelerate's tests pass
to its launcher, with two processes on a machine without several GPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import accelerate
from accelerate.test_utils import device_count, torch_device
from accelerate.utils import write_basic_config

from conformance._report import Report, TestResult

SCRIPTS = Path(accelerate.__file__).parent / "test_utils" / "scripts"
PROCESSES = max(2, device_count)
DEFAULT = (f"--num_processes={PROCESSES}", "--monitor_interval=0.1")
TWO_PROCESSES = ("--num_processes=2", "--num_machines=1", "--machine_rank=0")
FSDP = (
    *TWO_PROCESSES,
    *("--use_fsdp", "--fsdp_version=1", "--fsdp_sharding_strategy=FULL_SHARD"),
    *("--fsdp_auto_wrap_policy=TRANSFORMER_BASED_WRAP", "--fsdp_state_dict_type=FULL_STATE_DICT"),
    "--fsdp_transformer_layer_cls_to_wrap=BertLayer",
)
DEEPSPEED = (
    *TWO_PROCESSES,
    *("--use_deepspeed", "--gradient_accumulation_steps=1", "--gradient_clipping=1"),
    *("--zero3_init_flag=True", "--offload_param_device=none"),
    *("--zero3_save_16bit_model=True", "--zero_stage=2", "--offload_optimizer_device=none"),
)


@dataclass(frozen=True)
class Case:
    """One script with one command line.

    Attributes:
        options: Options of the launcher. `{config}` is a config file that Accelerate has written.
        script: Name of the script.
        needs_gpus: Whether the script fails on CPUs also without Drawbar.
        output: Text that the script must print.
    """

    options: tuple[str, ...]
    script: str
    needs_gpus: bool = False
    output: str = ""


STATE = f"Num processes: {PROCESSES}\n"
CASES: Mapping[str, Case] = MappingProxyType(
    {
        "test_multi_device": Case(DEFAULT, "test_script.py", output=STATE),
        # On CPUs, `PartialState()` starts no process group, also under `accelerate launch`.
        "test_multi_device_ops": Case(DEFAULT, "test_ops.py", True, output=STATE),
        "test_multi_device_merge_fsdp_weights": Case(DEFAULT, "test_merge_weights.py", True),
        "test_distributed_data_loop": Case(
            ("--num_processes=2",), "test_distributed_data_loop.py", True
        ),
        "test_gradient_sync_multi_device": Case(DEFAULT, "test_sync.py"),
        "test_ddp_comm_hook": Case(DEFAULT, "test_ddp_comm_hook.py", True),
        "test_no_config": Case(("--monitor_interval", "0.1"), "test_cli.py"),
        "test_accelerate_test": Case(("--accelerate",), "test_script.py"),
        "test_accelerate_test_config_file": Case(("--config_file={config}",), "test_script.py"),
        "test_simple_launcher": Case(
            (
                *("--cpu", "--num_processes", "1", "--num_machines", "1"),
                *("--mixed_precision", "no", "--dynamo_backend", "no"),
                *("--num_cpu_threads_per_process", "1", "--quiet"),
            ),
            "test_script.py",
            output="Num processes: 1\n",
        ),
        "test_fsdp_options": Case((*FSDP, "--mixed_precision=bf16"), "test_cli.py"),
        "test_deepspeed_options": Case((*DEEPSPEED, "--mixed_precision=bf16"), "test_cli.py"),
        "test_hyphen": Case(("--num-processes", "2", "--mixed-precision", "bf16"), "test_ops.py"),
    }
)
"""Command lines, by the names of Accelerate's tests."""


def run_accelerate_tests() -> Report:
    """Run the scripts."""
    with tempfile.TemporaryDirectory(prefix="conformance") as directory:
        write_basic_config(save_location=f"{directory}/config.yaml")
        results = [_run(name, case, directory) for name, case in CASES.items()]
    return Report("accelerate", f"Accelerate {accelerate.__version__}", tuple(results))


def _run(name: str, case: Case, directory: str) -> TestResult:
    if case.needs_gpus and torch_device == "cpu":
        return TestResult(name, "skipped", "needs GPUs")
    options = [option.format(config=f"{directory}/config.yaml") for option in case.options]
    process = subprocess.run(
        [
            *(sys.executable, "-m", "drawbar.cli", "launch", "--storage-path", directory),
            *("--hang-timeout", "180", *options, str(SCRIPTS / case.script)),
        ],
        capture_output=True,
        text=True,
        env={**os.environ, "RAY_TMPDIR": directory},  # finds no Ray cluster of another program
    )
    if process.returncode:
        lines = process.stderr.strip().splitlines() or [f"exit code {process.returncode}"]
        return TestResult(name, "failed", lines[-1])
    if case.output not in process.stdout:
        return TestResult(name, "failed", f"no {case.output.strip()!r} in the output")
    return TestResult(name, "passed")
