"""Pure decisions of the commands: options of torchrun, Ray addresses, signals, checks of doctor."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import ray
import torch

from drawbar._ray_connection import ray_probe
from drawbar._ray_connection.ray_probe import find_local_address
from drawbar.cli._doctor import checks
from drawbar.cli._doctor.cluster import NodeProbe, check_node_pairs
from drawbar.cli._doctor.machine import MachineInfo
from drawbar.cli._exit_handling import StopSignals
from drawbar.cli._option_names import name_options
from drawbar.cli._output import CommandError
from drawbar.cli._ray_connection import num_local_cpus
from drawbar.cli._torchrun import (
    ONLY_TORCHRUN,
    SHARED,
    TorchrunArguments,
    count_processes_per_node,
    parse_torchrun_arguments,
    resolve_num_workers,
)
from drawbar.train.run_modes import check_reachable
from tests._ray_compat import get_ray_address_file
from tests.cli.conftest import Command

# -- drawbar launch


def parse_torchrun(arguments: list[str], **environment: str) -> TorchrunArguments:
    names = ("--nnodes", "--nproc-per-node", "--num-workers", "--detach", "-m", "--module")
    return parse_torchrun_arguments(arguments, names, {"--detach", "-m", "--module"}, environment)


def test_parse_torchrun_arguments_keeps_script_arguments() -> None:
    options = ["--rdzv_backend", "c10d", "--nproc_per_node", "2", "-t=3", "-r1", "--detach"]
    parsed = parse_torchrun([*options, "--master-port=1", "--no-py", "a.py", "--tee", "1"])
    assert parsed.remaining == ["--nproc-per-node", "2", "--detach", "a.py", "--tee", "1"]
    assert parsed.values == {
        "--rdzv-backend": "c10d",
        "--tee": "3",
        "--redirects": "1",
        "--master-port": "1",
        "--no-python": "",
    }
    assert parsed.is_executable
    ignored = ["--rdzv-backend", "--master-port"]
    assert list(parsed.list_ignored(has_rendezvous=False)) == ignored


def test_parse_torchrun_arguments_reads_variables_of_other_options() -> None:
    variables = {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "4",
        "PET_MODULE": "0",
        "PET_NO_PYTHON": "1",
        "PET_ROLE": "trainer",
        "PET_LOG_DIR": "logs",
    }
    parsed = parse_torchrun(["--log-dir", "others", "--nnodes=1", "a.sh"], **variables)
    assert parsed.remaining == ["--nproc-per-node=4", "--nnodes=1", "a.sh"]
    assert parsed.values == {"--log-dir": "others", "--no-python": "", "--role": "trainer"}
    options = parsed.make_process_options()
    assert (options.role, options.log_dir) == ("trainer", os.path.abspath("others"))
    assert parse_torchrun(["--num-workers", "3", "a.sh"], **variables).remaining[0] != "--nnodes=2"
    with pytest.raises(CommandError, match="PET_MODULE must be 0 or 1, found 'yes'"):
        parse_torchrun(["a.py"], PET_MODULE="yes")
    with pytest.raises(CommandError, match="--tee needs a value"):
        parse_torchrun(["--tee"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tee", "4"], "tee must be 0 .none., 1 .standard output., .* found '4'"),
        (["--redirects", "0:x"], "redirects must be 0 .none."),
        (["--numa-binding", "core"], "numa_binding must be one of node, socket, .* found 'core'"),
        (["--local-ranks-filter", "0,b"], "must be local ranks such as 0,1; found '0,b'"),
        (["--log-dir", "/dev/null"], "log_dir='/dev/null' is not a directory"),
    ],
)
def test_torchrun_options_of_processes_with_invalid_values_raise(
    arguments: list[str], message: str
) -> None:
    with pytest.raises((CommandError, ValueError), match=message):
        parse_torchrun([*arguments, "a.py"]).make_process_options()


def test_logs_specs_without_entry_point_is_rejected() -> None:
    with pytest.raises(CommandError, match="no installed package has it"):
        parse_torchrun(["--logs-specs", "other", "a.py"]).list_ignored(has_rendezvous=False)


def count(nproc_per_node: str, gpus: int = 0, *, is_this_machine: bool = False) -> int:
    return count_processes_per_node(
        nproc_per_node, gpus=gpus, cpus=64, is_this_machine=is_this_machine
    )


def test_count_processes_per_node_of_torchrun_options(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = [count(kind, gpus=8) for kind in ("4", "gpu", "auto", "xpu", "cpu")]
    assert counts == [4, 8, 8, 8, 64]
    assert count("auto", gpus=8, is_this_machine=True) == 8
    assert count("auto") == 64
    for kind in ("0", "two", "hpu"):
        with pytest.raises(CommandError, match=f"must be N, cpu, auto, or .*, found '{kind}'"):
            count(kind, gpus=8)
    with pytest.raises(CommandError, match="found no device"):
        count("gpu")
    with pytest.raises(CommandError, match="or a device type such as gpu and xpu, found 'two'"):
        count("two", is_this_machine=True)
    monkeypatch.setattr(torch.xpu, "is_available", lambda: True)
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 3)
    assert count("xpu", gpus=8, is_this_machine=True) == 3


def test_resolve_num_workers_of_torchrun_options() -> None:
    assert resolve_num_workers(4, "1") == (4, True)
    assert resolve_num_workers(2, "3") == (6, False)
    assert resolve_num_workers(2, "1:4") == ((2, 8), False)
    for nodes in ("3:1", "x"):
        with pytest.raises(CommandError, match=f"--nnodes must be N or MIN:MAX, found '{nodes}'"):
            resolve_num_workers(2, nodes)


def test_num_local_cpus_above_pid_max_raises() -> None:
    cores = len(os.sched_getaffinity(0))
    assert [num_local_cpus(0), num_local_cpus(cores + 1)] == [cores, cores + 1]
    with pytest.raises(CommandError, match=r"^Cannot start 100000000000 processes: .* fewer than"):
        num_local_cpus(10**11)


def test_torchrun_options_are_all_known() -> None:
    from torch.distributed.run import get_args_parser

    named = re.findall(r"(?m)(?:^  |, )(--[\w-]+)", get_args_parser().format_help())
    options = {option for option in named if "_" not in option}
    assert options - {*SHARED, *ONLY_TORCHRUN, "--help"} == set()


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


# -- addresses of Ray


@pytest.mark.parametrize(
    "variables",
    [{}, {"TMPDIR": "{path}"}, {"RAY_TMPDIR": "{path}"}, {"TMPDIR": "/x", "RAY_TMPDIR": "{path}"}],
    ids=str,
)
def test_find_local_address_reads_the_file_that_ray_reads(
    variables: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("TMPDIR", "RAY_TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value.format(path=tmp_path))
    path = get_ray_address_file()
    if variables:
        assert find_local_address() is None
        path.parent.mkdir()
        path.write_text("10.0.0.1:6379\n")
        assert find_local_address() == "10.0.0.1:6379"
        path.write_bytes(b"\xff garbage")
        assert find_local_address() is None
    else:
        expected = path.read_text().strip() if path.exists() else None
        assert find_local_address() == expected


@contextmanager
def serve_http() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler) as server:
        threading.Thread(target=partial(server.serve_forever, 0.01), daemon=True).start()
        yield f"127.0.0.1:{server.server_port}"
        server.shutdown()


@contextmanager
def serve(reply: bytes | None) -> Iterator[str]:
    """Reply to a connection and close it; with None, accept none, so that there is no reply."""

    def accept() -> None:
        connection, _ = server.accept()
        with connection:
            connection.recv(4096)
            connection.sendall(reply or b"")
            connection.shutdown(socket.SHUT_WR)
            while connection.recv(4096):  # closing with unread data would discard the reply
                pass

    with socket.create_server(("127.0.0.1", 0)) as server:
        if reply is not None:
            threading.Thread(target=accept, daemon=True).start()
        yield f"127.0.0.1:{server.getsockname()[1]}"


TOKEN_REQUIRED = (
    bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # SETTINGS
    + bytes([0, 0, 16, 1, 5, 0, 0, 0, 1])  # HEADERS of the reply
    + b"\x00\x0bgrpc-status\x0216"
)


NOT_FOUND = (
    bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])  # SETTINGS
    + bytes([0, 0, 1, 1, 5, 0, 0, 0, 1])  # HEADERS of the reply
    + b"\x8d"  # :status 404
)


@pytest.mark.parametrize("prefix", ["", "ray://"])
def test_check_reachable_of_http_server_names_the_remedy(prefix: str) -> None:
    with serve_http() as address:
        message = f"No Ray cluster at {prefix}{address}: another program uses this port"
        with pytest.raises(ConnectionError, match=message):
            check_reachable(prefix + address)


@pytest.mark.parametrize(
    "reply",
    [b"-ERR unknown command 'PRI'\r\n", b"", b"\x00", None, NOT_FOUND],
    ids=["redis", "closed", "short", "silent", "http2"],
)
def test_check_reachable_of_another_program_raises(
    reply: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_probe, "REPLY_TIMEOUT_S", 0.2)
    with serve(reply) as address, pytest.raises(ConnectionError, match="another program"):
        check_reachable(address)


def test_check_reachable_with_tls_only_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with serve(None) as address:
        check_reachable(address)


def test_check_reachable_accepts_ray(ray_cluster: None, monkeypatch: pytest.MonkeyPatch) -> None:
    address = ray.get_runtime_context().gcs_address
    check_reachable(address)
    requires_token = os.environ.get("RAY_AUTH_MODE") == "token"  # set by `ray.init()` since 2.60
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    check_reachable(address, sends_token=True)
    with rejects("Set RAY_AUTH_MODE=token") if requires_token else nullcontext():
        check_reachable(address)
    monkeypatch.setenv("RAY_AUTH_MODE", "token")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "another-token-" * 10)
    with rejects("RAY_AUTH_TOKEN is wrong") if requires_token else nullcontext():
        check_reachable(address)
    monkeypatch.delenv("RAY_AUTH_TOKEN")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/nowhere")
    check_reachable(address)  # Ray explains the missing token


def rejects(advice: str) -> AbstractContextManager[object]:
    return pytest.raises(PermissionError, match=rf"cluster at \S+ requires a token\. .*{advice}")


def test_command_with_cluster_that_rejects_token_prints_one_line(
    cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    with serve(TOKEN_REQUIRED) as address:
        result = cli("doctor", "--address", address)
    assert result.err == (
        f"drawbar: error: The Ray cluster at {address} requires a token. Set RAY_AUTH_MODE=token, "
        "and provide the token in ~/.ray/auth_token, RAY_AUTH_TOKEN_PATH, or RAY_AUTH_TOKEN.\n"
    )
    assert result.code == 2


@pytest.mark.parametrize(
    ("reply", "expected"), [(TOKEN_REQUIRED, "Permission"), (b"", "Connection")]
)
def test_fit_with_ray_address_that_rejects_the_driver_raises(reply: bytes, expected: str) -> None:
    code = """
from drawbar import train
try:
    train.DataParallelTrainer(print).fit()
except OSError as error:
    print(type(error).__name__)
"""
    with serve(reply) as address:
        done = subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "RAY_ADDRESS": address, "RAY_AUTH_MODE": ""},
            capture_output=True,
            text=True,
        )
    assert (done.stdout, done.stderr) == (f"{expected}Error\n", "")


def test_doctor_with_address_of_another_program_prints_one_line(cli: Command) -> None:
    with serve_http() as address:
        result = cli("doctor", "--address", address)
    line = result.err.splitlines()[-1]
    assert line.startswith(f"drawbar: error: Cannot connect to a Ray cluster at '{address}': ")
    assert "another program uses this port" in line
    assert result.code == 2


# -- drawbar doctor

GB = 10**9
MACHINE = MachineInfo(
    host="a",
    python="3.11.7",
    packages={"ray": "2.60.0", "torch": "2.9.0"},
    gpus=["GPU 0: H100"],
    torch_cuda="12.8",
    torch_gpus=1,
    unsupported_gpus=[],
    open_files=65536,
    processes=-1,
    fork_obstacle="",
    shared_memory=(8 * GB, 8 * GB),
    disks={"temporary files": (50 * GB, 100 * GB)},
)


def test_check_machine_without_problems_gives_no_advice() -> None:
    assert {result.advice for result in checks.check_machine(MACHINE)} == {""}


@pytest.mark.parametrize(
    ("change", "status", "subject", "advice"),
    [
        ({"torch_cuda": None, "torch_gpus": 0}, "error", "GPUs", "Install torch for"),
        ({"unsupported_gpus": ["B200 (sm_100)"]}, "error", "GPUs", "Install a torch build"),
        ({"torch_gpus": 0}, "warning", "GPUs", "CUDA_VISIBLE_DEVICES"),
        ({"open_files": 1024}, "warning", "open files limit", "ulimit -n 8192"),
        ({"processes": 512}, "warning", "processes limit", "ulimit -u 4096"),
        ({"fork_obstacle": "no"}, "warning", "forked workers", "Restarts take longer"),
        ({"shared_memory": (60 * 10**6, 64 * 10**6)}, "warning", "/dev/shm", "--shm-size"),
        ({"disks": {"storage path": (GB, 100 * GB)}}, "warning", "disk (storage path)", "Free"),
    ],
)
def test_check_machine_reports_each_problem_with_advice(
    change: dict[str, object], status: str, subject: str, advice: str
) -> None:
    results = checks.check_machine(replace(MACHINE, **change))  # type: ignore[arg-type]
    (problem,) = [result for result in results if result.status != "ok"]
    assert (problem.status, problem.subject, problem.node) == (status, subject, "a")
    assert advice in problem.advice


def test_check_consistency_compares_versions_and_clocks() -> None:
    other = replace(MACHINE, host="b", packages={"ray": "2.59.0", "torch": "2.9.0"})
    results = checks.check_consistency([MACHINE, other], [0.0, -9.0])
    problems = [result for result in results if result.status != "ok"]
    assert [problem.subject for problem in problems] == ["ray", "clock"]
    assert problems[0].value == "2.60.0 on a, 2.59.0 on b"
    assert problems[1].value == "9.00 s behind"


@pytest.mark.nightly
@pytest.mark.usefixtures("ray_cluster")
def test_check_node_pairs_of_two_processes() -> None:
    pair = {name: ray.remote(NodeProbe).options(num_cpus=0).remote() for name in ("a", "b")}
    (passed,) = check_node_pairs(pair, "gloo")
    assert (passed.status, passed.node) == ("ok", "a and b")
    assert float(passed.value.split()[0]) > 0
    (failed,) = check_node_pairs(pair, "nothing")
    assert (failed.status, "SOCKET_IFNAME" in failed.advice) == ("error", True)


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ('RunConfig.resume="must", but', "--resume must, but"),
        ("set RunConfig.storage_path to", "set --storage-path to"),
        ("storage_path='/a' cannot", "--storage-path '/a' cannot"),
        ("FailureConfig(max_failures=3) allows 3", "--max-failures 3 allows 3"),
        ("FailureConfig.max_startup_failures=2 is", "max_startup_failures=2 is"),
        (
            "Lower ScalingConfig.num_workers or resources_per_worker",
            "Lower --num-workers or --cpus-per-worker",
        ),
        ("ScalingConfig has use_gpu=True and", "ScalingConfig has --use-gpu and"),
        ('fit() with resume="auto" resumes', "drawbar launch with --resume auto resumes"),
        ("my_name='a' and profit() and ValueError: resume", None),
        (
            "rank 0: ValueError: num_workers=4, call fit()\n\nThe run ends: use max_failures=3",
            "rank 0: ValueError: num_workers=4, call fit()\n\nThe run ends: use --max-failures 3",
        ),
        ("  Traceback (most recent call last):\n    model.fit()\n  TypeError: name='a'", None),
        (
            "The run ends: fit() failed.\n  Attempt 0: ValueError: num_workers=4\n  Call fit().",
            "The run ends: drawbar launch failed.\n  Attempt 0: ValueError: num_workers=4\n"
            "  Call drawbar launch.",
        ),
    ],
)
def test_name_options_replaces_settings_of_python(message: str, expected: str | None) -> None:
    assert name_options(message) == (expected or message)


@pytest.mark.parametrize("is_installed", [True, False])
def test_launch_with_unknown_option_suggests_one_of_torchrun(
    is_installed: bool, cli: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_installed:
        monkeypatch.setattr("drawbar.launch._accelerate.find_spec", lambda name: None)
    result = cli("launch", "--nprocs", "2", "script.py")
    assert result.code == 2
    assert "Did you mean --nproc-per-node?" in result.err
