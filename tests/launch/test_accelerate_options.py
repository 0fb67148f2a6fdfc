"""`drawbar launch` with the command lines of `accelerate launch`."""

from __future__ import annotations

import json
from pathlib import Path

from tests.launch.conftest import Launch

PRINT_ENVIRONMENT = """
    import json, os, sys

    names = ("RANK", "WORLD_SIZE", "OMP_NUM_THREADS", "TORCHELASTIC_RUN_ID")
    values = {name: os.environ.get(name) for name in names}
    values |= {name: value for name, value in os.environ.items() if name.startswith("ACCELERATE")}
    print(json.dumps(values | {"argv": sys.argv[1:]}))
"""


def test_launch_with_options_of_accelerate_starts_processes_with_its_environment(
    launch: Launch,
) -> None:
    launch.num_workers = None
    options = (
        *("--num_processes", "2", "--mixed_precision", "bf16", "--num-cpu-threads-per-process=3"),
        *("--machine_rank", "0", "--main_process_port", "29511", "--monitor_interval", "0.1"),
    )
    script = (str(launch.script), "--mixed_precision", "fp8")
    done = launch(PRINT_ENVIRONMENT, *options, script=script)
    assert done.code == 0, done.err
    env = json.loads(done.out)
    assert (env["RANK"], env["WORLD_SIZE"], env["OMP_NUM_THREADS"]) == ("0", "2", "3")
    assert env["ACCELERATE_MIXED_PRECISION"] == "bf16"
    assert env["ACCELERATE_USE_CPU"] == "true"
    assert env["argv"] == ["--mixed_precision", "fp8"]
    assert sorted(line.split(": ")[2] for line in done.err.splitlines()) == [
        "Ignoring --machine-rank",
        "Ignoring --main-process-port",
        "Ignoring --monitor-interval",
    ]


def test_launch_reads_default_config_file_of_accelerate_only_for_its_command_lines(
    launch: Launch, tmp_path: Path
) -> None:
    launch.num_workers = None
    path = tmp_path / "accelerate" / "default_config.yaml"
    path.parent.mkdir()
    path.write_text(
        "{distributed_type: 'NO', num_processes: 1, num_machines: 1, mixed_precision: fp16, "
        "main_training_function: main, use_cpu: true}"
    )
    ignored = launch(PRINT_ENVIRONMENT, HF_HOME=str(tmp_path))
    assert json.loads(ignored.out)["RANK"] == "0"
    assert "ACCELERATE_MIXED_PRECISION" not in json.loads(ignored.out)
    assert ignored.err == (
        f"drawbar: Starting 1 process without Accelerate's {path}. Pass --accelerate to use it.\n"
    )
    used = launch(PRINT_ENVIRONMENT, "--accelerate", "--name", "used", HF_HOME=str(tmp_path))
    assert used.code == 0, used.err
    env = json.loads(used.out)
    assert env["RANK"] is env["WORLD_SIZE"] is env["TORCHELASTIC_RUN_ID"] is None
    assert env["ACCELERATE_MIXED_PRECISION"] == "fp16"
    assert used.err == f"drawbar: Using Accelerate's default config file {path}.\n"
