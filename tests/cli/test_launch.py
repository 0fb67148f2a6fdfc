"""Tests of the options of `drawbar launch`, without starting a run."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from drawbar.cli._exit_handling import StopSignals
from drawbar.cli._output import CommandError
from drawbar.cli._ray_connection import num_local_cpus
from drawbar.cli._torchrun import IGNORED, UNSUPPORTED, remove_torchrun_options, resolve_num_workers
from tests.cli.conftest import Command


def test_remove_torchrun_options_keeps_script_arguments() -> None:
    options = [
        "--rdzv_backend",
        "c10d",
        "--nproc_per_node",
        "2",
        "-t=3",
        "--detach",
        "--master-port=1",
    ]
    remaining, ignored = remove_torchrun_options([*options, "a.py", "--tee", "1"], {"--detach"})
    assert remaining == ["--nproc-per-node", "2", "--detach", "a.py", "--tee", "1"]
    assert ignored == ["--rdzv-backend", "--tee", "--master-port"]


@pytest.mark.parametrize(
    ("per_node", "nodes", "workers"),
    [
        ("4", "1", (4, True)),
        ("2", "3", (6, False)),
        ("2", "1:4", ((2, 8), False)),
        ("gpu", "2", (16, False)),
        ("auto", "1", (8, True)),
        ("cpu", "1", (64, True)),
    ],
)
def test_resolve_num_workers_of_torchrun_options(
    per_node: str, nodes: str, workers: object
) -> None:
    assert resolve_num_workers(per_node, nodes, gpus=8, cpus=64) == workers


@pytest.mark.parametrize(
    ("per_node", "nodes", "message"),
    [
        ("0", "1", "--nproc-per-node must be N, gpu, cpu, or auto, found '0'"),
        ("two", "1", "--nproc-per-node must be N, gpu, cpu, or auto, found 'two'"),
        ("2", "3:1", "--nnodes must be N or MIN:MAX, found '3:1'"),
        ("2", "x", "--nnodes must be N or MIN:MAX, found 'x'"),
    ],
)
def test_resolve_num_workers_of_invalid_values_raises(
    per_node: str, nodes: str, message: str
) -> None:
    with pytest.raises(CommandError, match=message):
        resolve_num_workers(per_node, nodes, gpus=0, cpus=1)


def test_num_local_cpus_above_pid_max_raises() -> None:
    cores = len(os.sched_getaffinity(0))
    assert [num_local_cpus(0), num_local_cpus(cores + 1)] == [cores, cores + 1]
    with pytest.raises(CommandError, match=r"^Cannot start 100000000000 processes: .* fewer than"):
        num_local_cpus(10**11)


def test_torchrun_options_are_all_known() -> None:
    from torch.distributed.run import get_args_parser

    known = {"--nnodes", "--nproc-per-node", "--max-restarts", "--standalone", "--module", "--help"}
    named = re.findall(r"(?m)(?:^  |, )(--[\w-]+)", get_args_parser().format_help())
    options = {option for option in named if "_" not in option}
    assert options - known - IGNORED.keys() - UNSUPPORTED.keys() == set()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nowhere.py"], "No script nowhere.py in"),
        (["--node_rank", "1", "a.py"], "Run the command once"),
        (["--num-workers", "2", "--nnodes", "2", "a.py"], "--num-workers cannot be combined with"),
        (["--address", "a", "--standalone", "-m", "no.such"], "No module no.such in"),
        (["--address", "a", "--standalone", "-m", "json.nosuch"], "No module json.nosuch in"),
        (["--address", "a", "--standalone", "/tmp"], "/tmp is a directory. Pass a script in it"),
        (["/nowhere.py"], "No script /nowhere.py."),
        (
            ["--address", "a", "--standalone", "--num-workers", "0", "{script}"],
            "--num-workers must be N or MIN:MAX",
        ),
        (["--env", "NAME", "{script}"], "--env must be NAME=VALUE"),
        (["--resume", "perhaps", "{script}"], "RunConfig.resume"),
        (["--num-workers", "64", "{script}"], "64"),
        (
            ["--nproc-per-node", "100000000000", "{script}"],
            "100000000000 workers of CPU=1 cannot fit with placement_strategy='STRICT_PACK': "
            "at most 8 fit on one node",
        ),
    ],
)
def test_launch_with_invalid_arguments_prints_one_line(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    cli: Command,
    ray_cluster: None,
) -> None:
    script = tmp_path / "script.py"
    script.touch()
    output = cli("launch", *(argument.format(script=script) for argument in arguments))
    assert (output.code, output.out) == (2, "")
    assert expected in output.err
    assert output.err.count("\n") == 1


@pytest.fixture
def restored_signals() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE)
    handlers = {number: signal.getsignal(number) for number in numbers}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("restored_signals")
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_stop_signals_while_a_run_starts_are_deferred(number: signal.Signals, code: int) -> None:
    signals = StopSignals()
    signal.raise_signal(number)
    with pytest.raises(KeyboardInterrupt):
        signals.release()
    assert signals.exit_code == code
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)


@pytest.mark.usefixtures("restored_signals")
def test_stop_signals_second_ctrl_c_while_a_run_starts_interrupts() -> None:
    StopSignals()
    signal.raise_signal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
