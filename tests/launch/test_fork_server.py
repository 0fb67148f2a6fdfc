"""Ranks of `drawbar launch` that are forked from a process with the imports of their script."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from drawbar._modes.program_launch import ERROR_VARIABLE
from tests.launch.conftest import CORES, Launch, Launched, Pipe

# Prints the ID of the fork server, 0 in a new interpreter. pandas is the fastest import.
SCRIPT = """
import os
import sys

import pandas

def get_server():
    with open(f"/proc/{os.getppid()}/cmdline") as file:
        return os.getppid() if "program_server.py" in file.read() else 0
"""

STATE = """
import faulthandler, gc, json, multiprocessing, resource, signal, sys, tempfile, threading, warnings

SAME = {"RANK": os.environ["RANK"]}
for name in sorted(os.environ):
    changing = ("MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "DRAWBAR_")
    if not name.startswith(changing):
        SAME[name] = os.environ[name]
streams = (sys.stdin, sys.stdout, sys.stderr)
state = {
    "forked": bool(get_server()),
    "random": [random.random(), float(numpy.random.rand())],
    "same": {
        "environ": SAME,
        "marker": os.environ["DRAWBAR_PROGRAM"] in open("/proc/self/environ").read(),
        "names": sorted(name for name in globals() if name not in ("SAME", "name", "changing")),
        "spec": repr(__spec__ and __spec__.name),
        "main": [__name__, __file__, sys.modules["__main__"].__dict__ is globals()],
        "argv": sys.argv,
        "path": sys.path,
        "directory": os.getcwd(),
        "flags": [repr(sys.flags), sys.warnoptions, dict(sys._xoptions), sys.executable],
        "session": [os.getpid() == os.getsid(0) == os.getpgrp(), os.nice(0), os.umask(0o22)],
        "descriptors": len(os.listdir("/proc/self/fd")),
        "inheritable": [n for n in map(int, os.listdir("/proc/self/fd"))
                        if os.path.exists(f"/proc/self/fd/{n}") and os.get_inheritable(n)],
        "signals": {int(n): str(signal.getsignal(n)) for n in signal.valid_signals()},
        "mask": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "streams": [(s.name, s.mode, s.encoding, s.errors, s.line_buffering, s.isatty())
                    for s in streams],
        "stdin": sys.stdin.read(),
        "threads": [threading.main_thread() is threading.current_thread(),
                    sorted(thread.name for thread in threading.enumerate())],
        "process": [multiprocessing.current_process().name, multiprocessing.get_start_method(True)],
        "faulthandler": faulthandler.is_enabled(),
        "warnings": [str(filter) for filter in warnings.filters],
        "gc": [gc.isenabled(), gc.get_threshold()],
        "limits": [resource.getrlimit(limit) for limit in range(16)],
        "temporary": tempfile.gettempdir(),
        "cpus": sorted(os.sched_getaffinity(0)),
    },
}
print(json.dumps(state))
"""


def read_states(done: Launched) -> list[dict[str, Any]]:
    assert done.code == 0, done.err
    return [json.loads(done.log(rank).splitlines()[-1]) for rank in range(2)]


@pytest.mark.parametrize(
    "script",
    [
        ("script.py", "--x=1", "b c"),
        pytest.param(("-m", "package.module", "x"), marks=pytest.mark.nightly),
    ],
)
def test_forked_rank_has_the_state_of_a_new_interpreter(
    launch: Launch, script: tuple[str, ...]
) -> None:
    source = SCRIPT.replace("import pandas", "import random\nimport numpy\nimport pandas") + STATE
    package = launch.directory / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import pandas\n")
    (package / "module.py").write_text(source)
    binding = ["--numa-binding", "exclusive" if CORES > 1 else "node"]
    variables = {"PYTHONWARNINGS": "error::UserWarning", "PYTHONPROFILEIMPORTTIME": "1"}
    forked, fresh = (
        launch(source, f"--name={name}", *options, *binding, script=script, **variables)
        for name, options in (("forked", []), ("fresh", ["--no-fork-server"]))
    )
    forked_states, fresh_states = (
        read_states(Launched(done.code, done.out, done.err, launch.directory / name))
        for name, done in (("forked", forked), ("fresh", fresh))
    )
    assert [state["forked"] for state in forked_states + fresh_states] == [True, True, False, False]
    for forked_state, fresh_state in zip(forked_states, fresh_states, strict=True):
        assert forked_state["same"] == fresh_state["same"]
    all_cpus = [cpu for state in forked_states for cpu in state["same"]["cpus"]]
    assert CORES == 1 or len(all_cpus) == len(set(all_cpus))
    first, second = (state["random"] for state in forked_states)
    assert first[0] != second[0]
    assert first[1] != second[1]
    # Every rank has the output of the imports.
    for rank in range(2):
        log = (launch.directory / "forked" / f"logs/rank_{rank}.log").read_text()
        assert log.count("| pandas\n") == 1
    assert forked.err.count("| pandas\n") == 1


@pytest.mark.parametrize(
    ("ending", "code", "error"),
    [
        pytest.param("sys.exit(3)", 3, "", marks=pytest.mark.nightly),
        ("raise ValueError('wrong')", 1, 'line 12, in <module>\n    raise ValueError("wrong")'),
        pytest.param("os._exit(4)", 4, "", marks=pytest.mark.nightly),
        pytest.param("os.abort()", 134, "killed by SIGABRT", marks=pytest.mark.nightly),
        ("import ctypes; ctypes.string_at(0)", 139, "Fatal Python error: Segmentation fault"),
    ],
)
def test_forked_rank_ends_like_a_new_interpreter(
    launch: Launch, ending: str, code: int, error: str
) -> None:
    done = launch(f"{SCRIPT}\nassert get_server()\n{ending}\n")
    assert done.code == code
    # The command shows the output of rank 0, which the failure of the other rank may end earlier.
    assert error.replace('"', "'") in done.err + done.log(0) + done.log(1)
    if "raise" in ending:
        assert "program_server" not in done.err


def test_forked_ranks_restart_from_the_same_server(launch: Launch) -> None:
    source = f"""{SCRIPT}
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
print(get_server(), attempt, os.environ["MASTER_PORT"], flush=True)
sys.exit(attempt == "0")
"""
    done = launch(source, "--max-restarts=1")
    assert done.code == 0, done.err
    for rank in range(2):
        (first, *_, first_port), (second, attempt, second_port) = map(
            str.split, done.log(rank).splitlines()
        )
        assert (first, attempt) == (second, "1")
        assert first != "0"
        assert first_port != second_port


def test_changed_script_is_not_forked_after_a_restart(launch: Launch) -> None:
    source = f"""{SCRIPT}
from drawbar.train import collective
print(bool(get_server()), os.environ.get({ERROR_VARIABLE!r}), flush=True)
collective.barrier()
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    if os.environ["RANK"] == "0":
        with open(__file__, "a") as file:
            file.write("# changed\\n")
    sys.exit(1)
"""
    done = launch(source, "--max-restarts=1")
    assert done.out.decode().splitlines() == ["True None", "False an imported file has changed"]


NOT_FIRST = "the script does not begin with imports that can be shared"


@pytest.mark.parametrize(
    ("source", "files", "reason"),
    [
        (
            "import os\nos.environ['OMP_NUM_THREADS'] = os.environ['MKL_NUM_THREADS'] = '2'\n"
            "import torch\n"
            "assert torch.get_num_threads() == 2",
            (),
            NOT_FIRST,
        ),
        pytest.param(
            *("import helper\nimport pandas", ("helper.py",), NOT_FIRST),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *("import pandas\nassert pandas.LOCAL", ("pandas.py",), NOT_FIRST),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            "import colorsys\nimport pandas\nassert colorsys.LOCAL",
            *(("colorsys.py",), NOT_FIRST),
            marks=pytest.mark.nightly,
        ),
        (
            "import pandas\nimport numexpr",
            ("numexpr.py",),
            "in the directory of the script: numexpr",
        ),
    ],
)
def test_import_that_may_differ_in_the_script_is_not_shared(
    launch: Launch, source: str, files: tuple[str, ...], reason: str
) -> None:
    # Not in the working directory, in which the launcher would find the files too.
    directory = launch.directory / "directory"
    directory.mkdir()
    for name in files:
        (directory / name).write_text("LOCAL = True\n__version__ = '9'\n")
    script = directory / "script.py"
    show_error = f"import os; print(os.environ.get({ERROR_VARIABLE!r}))"
    script.write_text(f"{source}\n{show_error}\n")
    done = launch("", script=(str(script),))
    assert reason in done.out.decode(), done.err


@pytest.mark.nightly
def test_rank_zero_functions_of_lightning_know_their_rank(launch: Launch) -> None:
    source = f"""
import os

import lightning
from lightning.pytorch.utilities import rank_zero_only
from torchmetrics.utilities.prints import rank_zero_only as metrics_rank_zero_only

ranks = [os.environ["RANK"], rank_zero_only.rank, metrics_rank_zero_only.rank]
print(os.environ.get({ERROR_VARIABLE!r}), *ranks)
"""
    done = launch(source)
    assert [done.log(rank) for rank in range(2)] == ["None 0 0 0\n", "None 1 1 1\n"], done.err


def test_data_loader_and_spawned_processes_of_forked_ranks(launch: Launch) -> None:
    source = f"""
import multiprocessing
import os

import torch
from torch.utils.data import DataLoader

def double(value):
    return value * 2

if __name__ == "__main__":
    assert {ERROR_VARIABLE!r} not in os.environ
    loader = DataLoader(torch.arange(4), num_workers=1, collate_fn=lambda batch: sum(batch))
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(*loader, *pool.map(double, [1, 2]))
"""
    done = launch(source)
    assert done.out == b"tensor(0) tensor(1) tensor(2) tensor(3) 2 4\n", done.err


def test_sigkill_of_launcher_ends_fork_server_ranks_and_their_children(
    launch: Launch, pipe: Pipe, wait_until_gone: Callable[..., None]
) -> None:
    with launch.start(make_waiting_script(launch)) as process:
        pids = [int(pid) for _ in range(2) for pid in pipe.receive(process)]
        assert 0 not in pids
        process.kill()
        wait_until_gone(pids)


def test_sigkill_of_fork_server_ends_the_attempt(
    launch: Launch, pipe: Pipe, wait_until_gone: Callable[..., None]
) -> None:
    with launch.start(make_waiting_script(launch), "--max-restarts=1") as process:
        first, second = ([int(pid) for pid in pipe.receive(process)] for _ in range(2))
        os.kill(first[0], signal.SIGKILL)
        restarted = [int(pid) for _ in range(2) for pid in pipe.receive(process)]
        wait_until_gone([*first, *second])
        assert restarted[0] not in (0, first[0])
        os.kill(restarted[0], signal.SIGKILL)
        done = launch.wait_for_end(process)
    assert done.code == 137
    assert "program died: killed by SIGKILL" in done.err
    wait_until_gone(restarted)


def make_waiting_script(launch: Launch) -> str:
    """Return a script that sends the IDs of its server, of itself, and of a daemon, and waits."""
    return f"""{SCRIPT}
import signal

reader, writer = os.pipe()
if os.fork() == 0:
    os.setsid()  # only the environment of the rank, which is not in os.environ, shows its origin
    os.write(writer, b".")
    signal.pause()
    os._exit(0)
os.read(reader, 1)
daemon = int(open(f"/proc/self/task/{{os.getpid()}}/children").read())
with open({str(launch.directory / "pipe")!r}, "w") as file:
    print(get_server(), os.getpid(), daemon, file=file)
signal.pause()
"""


def test_daemon_of_forked_rank_ends_with_it(
    launch: Launch, wait_until_gone: Callable[..., None]
) -> None:
    source = f"""{SCRIPT}
assert get_server()
reader, writer = os.pipe()
if os.fork() == 0:
    import signal
    os.setsid()
    os.write(writer, b".")
    signal.pause()
    os._exit(0)
os.read(reader, 1)
print(open(f"/proc/self/task/{{os.getpid()}}/children").read(), flush=True)
os._exit(0)
"""
    done = launch(source)
    assert done.code == 0, done.err
    wait_until_gone([int(done.log(rank)) for rank in range(2)])


@pytest.mark.parametrize(
    ("package", "reason"),
    [
        ("import os; os.environ.get('RANK')", "imports depend on the rank: pandas"),
        pytest.param(
            *("FILE = open(__file__)", "imports have opened files: "), marks=pytest.mark.nightly
        ),
        pytest.param(
            "import os; os.posix_spawn('/bin/true', ['true'], {})",
            "imports have started processes",
            marks=pytest.mark.nightly,
        ),
        (
            "import threading as t; t.Thread(target=t.Event().wait, daemon=True).start()",
            "imports have started threads",
        ),
        pytest.param(
            *("import sys; sys.path.append('/')", "the imports changed sys.path"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(*("1 / 0", "an import raised ZeroDivisionError"), marks=pytest.mark.nightly),
        ("import os; os._exit(1)", "the fork server has ended"),
        ("import os; os.environ['SET_BY_IMPORT'] = '1'; print('output', flush=True)", ""),
    ],
)
def test_import_with_an_effect_that_a_fork_lacks_starts_new_processes(
    launch: Launch, package: str, reason: str
) -> None:
    directory = launch.directory / "site-packages" / "pandas"
    directory.mkdir(parents=True)
    # In a new process, only the effects on the environment and the output are repeated.
    guard = f"import os\nif {ERROR_VARIABLE!r} not in os.environ:\n    "
    (directory / "__init__.py").write_text(guard + package)
    source = (
        f"import pandas\nprint(os.environ.get({ERROR_VARIABLE!r}, os.environ.get('SET_BY_IMPORT')))"
    )
    done = launch(f"import os\n{source}", PYTHONPATH=str(directory.parent))
    assert done.code == 0, done.err
    assert done.out.decode().startswith(reason or "output\n1\n"), done.out


@pytest.mark.parametrize(
    ("number", "code"),
    [pytest.param(signal.SIGINT, 130, marks=pytest.mark.nightly), (signal.SIGKILL, -9)],
)
def test_end_of_launcher_while_the_fork_server_imports(
    launch: Launch,
    pipe: Pipe,
    wait_until_gone: Callable[..., None],
    number: signal.Signals,
    code: int,
) -> None:
    package = launch.directory / "site-packages" / "pandas"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        f"""
import os, signal
with open({str(launch.directory / "pipe")!r}, "w") as file:
    print(os.getpid(), file=file)
while True:
    signal.pause()
"""
    )
    with launch.start("import pandas", PYTHONPATH=str(package.parent)) as process:
        server = int(pipe.receive(process)[0])
        process.send_signal(number)
        done = launch.wait_for_end(process)
    assert done.code == code, done.err
    wait_until_gone([server])


@pytest.mark.nightly
def test_threads_of_openmp_and_openblas_in_forked_ranks(launch: Launch) -> None:
    source = f"""
import os

import lightgbm
import numpy
import xgboost
from sklearn.linear_model import LogisticRegression

assert {ERROR_VARIABLE!r} not in os.environ
x = numpy.random.default_rng(0).normal(size=(300, 300))
y = x[:, 0] > 0
print((x @ x).sum(), LogisticRegression().fit(x, y).score(x, y))
for model in (
    lightgbm.LGBMClassifier(n_estimators=3, num_threads=2, verbose=-1),
    xgboost.XGBClassifier(n_estimators=3, nthread=2),
):
    print(model.fit(x, y).predict_proba(x).sum(axis=0).tolist())
"""
    forked, fresh = (
        launch(source, *options, OMP_NUM_THREADS="2")
        for options in (("--name=forked",), ("--name=fresh", "--no-fork-server"))
    )
    assert forked.code == 0, forked.err
    assert forked.out == fresh.out
