"""What `drawbar launch` makes of its options, before anything starts."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from drawbar.cli._exit_handling import StopSignals
from drawbar.cli._output import CommandError
from drawbar.cli._ray_connection import num_local_cpus
from drawbar.cli._torchrun import IGNORED, UNSUPPORTED, remove_torchrun_options, resolve_num_workers
from tests.cli.conftest import Command


def test_torchruns_options_are_taken_from_before_the_script_alone() -> None:
    given = [
        "--rdzv_backend",
        "c10d",
        "--nproc_per_node",
        "2",
        "-t=3",
        "--detach",
        "--master-port=1",
    ]
    kept, ignored = remove_torchrun_options([*given, "a.py", "--tee", "1"], {"--detach"})
    assert kept == ["--nproc-per-node", "2", "--detach", "a.py", "--tee", "1"]
    assert ignored == ["--rdzv-backend", "--tee", "--master-port"]


@pytest.mark.parametrize(
    ("each", "nodes", "workers"),
    [
        ("4", "1", (4, True)),
        ("2", "3", (6, False)),
        ("2", "1:4", ((2, 8), False)),
        ("gpu", "2", (16, False)),
        ("auto", "1", (8, True)),
        ("cpu", "1", (64, True)),
    ],
)
def test_torchruns_workers(each: str, nodes: str, workers: object) -> None:
    assert resolve_num_workers(each, nodes, gpus=8, cpus=64) == workers


@pytest.mark.parametrize(("each", "nodes"), [("0", "1"), ("two", "1"), ("2", "3:1"), ("2", "x")])
def test_wrong_numbers_of_workers(each: str, nodes: str) -> None:
    with pytest.raises(CommandError, match=r"is a number"):
        resolve_num_workers(each, nodes, gpus=0, cpus=1)


def test_what_no_machine_has_is_refused_before_ray_starts() -> None:
    cores = len(os.sched_getaffinity(0))
    assert [num_local_cpus(0), num_local_cpus(cores + 1)] == [cores, cores + 1]
    with pytest.raises(CommandError, match=f"^100000000000 processes .* has {cores} CPUs"):
        num_local_cpus(10**11)


def test_every_option_of_torchruns_has_a_meaning_or_a_reason() -> None:
    from torch.distributed.run import get_args_parser

    known = {"--nnodes", "--nproc-per-node", "--max-restarts", "--standalone", "--module", "--help"}
    theirs = {
        option
        for action in get_args_parser()._actions
        for option in action.option_strings
        if option.startswith("--") and "_" not in option
    }
    assert theirs - known - IGNORED.keys() - UNSUPPORTED.keys() == set()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--node_rank", "1", "a.py"], "start the command once"),
        (["--num-workers", "2", "--nnodes", "2", "a.py"], "give --num-workers, or"),
        (["--address", "a", "--standalone", "-m", "no.such"], "there is no module no.such in"),
        (["--address", "a", "--standalone", "-m", "json.nosuch"], "there is no module json.nosuch"),
        (["--address", "a", "--standalone", "/tmp"], "/tmp is a directory. Pass a script in it"),
        (["/nowhere.py"], "there is no script /nowhere.py\n"),
        (
            ["--address", "a", "--standalone", "--num-workers", "0", "{script}"],
            "--num-workers is a number",
        ),
        (["--env", "NAME", "{script}"], "--env is NAME=VALUE"),
        (["--resume", "perhaps", "{script}"], "RunConfig.resume"),
        (["--num-workers", "64", "{script}"], "64"),
        (
            ["--nproc-per-node", "100000000000", "{script}"],
            "100000000000 workers of CPU=1 cannot fit with placement_strategy='STRICT_PACK': "
            "at most 8 fit on one node",
        ),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(
    arguments: list[str],
    told: str,
    tmp_path: Path,
    drawbar: Command,
    ray_cluster: None,
) -> None:
    script = tmp_path / "script.py"
    script.touch()
    output = drawbar("launch", *(each.format(script=script) for each in arguments))
    assert (output.code, output.out) == (2, "")
    assert told in output.err
    assert output.err.count("\n") == 1


@pytest.fixture
def restored_signals() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGHUP, signal.SIGTERM, signal.SIGPIPE)
    handlers = {number: signal.getsignal(number) for number in numbers}
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
