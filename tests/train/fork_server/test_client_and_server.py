"""Fork server without Ray: the command of a worker, with small scripts in place of Ray's."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from drawbar._fork_server.client import ERROR_VARIABLE
from drawbar._fork_server.fork_server_spec import ForkServerSpec

Process = subprocess.Popen[str]
WaitUntilGone = Callable[..., None]

PRINT_ORIGIN = f"""
import os
with open("/proc/self/cmdline") as file:
    is_forked = "server.py" in file.read()
print("forked" if is_forked else "fresh: " + os.environ[{ERROR_VARIABLE!r}])
"""
PRINT_SERVER = "import os; print(os.getppid(), flush=True)"
# A process that runs the command from its arguments, as a raylet does, and waits for its input.
RAYLET = "import subprocess, sys; subprocess.run(['bash', '-c', sys.argv[1]]); sys.stdin.read()"
# A driver that prints the command of a worker, and waits for its input.
DRIVER = """
import sys
from drawbar._fork_server.fork_server_spec import ForkServerSpec
print(ForkServerSpec.create((), [], {}).make_command(), flush=True)
sys.stdin.read()
"""


class Commands:
    """Start worker commands. Modules that the server can import are in `modules`."""

    def __init__(self, directory: Path) -> None:
        self.modules = directory / "modules"
        self.modules.mkdir()
        self._script = directory / "worker.py"
        self.processes: list[Process] = []

    def make(self, script: str, *preload: str, command: str = "", arguments: str = "") -> str:
        """Return the shell command of a worker that runs a script."""
        self._script.write_text(textwrap.dedent(script))
        command = command or ForkServerSpec.create(preload, [str(self.modules)], {}).make_command()
        return f"exec {command} {self._script} {arguments}"

    def start(self, arguments: list[str], **options: Any) -> Process:
        """Start a process that is killed at the end of the test."""
        process = subprocess.Popen(
            arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options
        )
        self.processes.append(process)
        return process

    def run(self, script: str, *preload: str, **options: Any) -> str:
        """Run a script in a worker and return its output."""
        return self.start(["bash", "-c", self.make(script, *preload)], **options).communicate()[0]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Commands]:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # other tests use other servers
    commands = Commands(tmp_path)
    yield commands
    for process in commands.processes:
        process.kill()
        process.communicate()


def read_line(process: Process) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_worker_has_modules_arguments_environment_and_directory(commands: Commands) -> None:
    (commands.modules / "preloaded.py").write_text("import os; PID = os.getpid()")
    script = """
        import os, sys, preloaded
        assert __name__ == "__main__" and sys.argv == [__file__, "--x=1", "b c"]
        assert sys.path[1] == os.path.dirname(__file__)  # Ray inserts its own folder
        assert os.environ["ONLY_HERE"] == "1" and os.getcwd() == "/"
        assert preloaded.PID == os.getppid() and os.getpgrp() == os.getpid()
        print(input(), end="")
        """
    command = commands.make(script, "preloaded", arguments="--x=1 'b c'")
    process = commands.start(["bash", "-c", command], env={**os.environ, "ONLY_HERE": "1"}, cwd="/")
    assert process.communicate("from standard input")[0] == "from standard input"


@pytest.mark.parametrize(
    ("ending", "code"),
    [
        ("pass", 0),
        pytest.param("sys.exit('message')", 1, marks=pytest.mark.nightly),
        ("raise ValueError", 1),
        pytest.param("os._exit(3)", 3, marks=pytest.mark.nightly),
        pytest.param("os.abort()", -signal.SIGABRT, marks=pytest.mark.nightly),
        ("os.kill(os.getpid(), 9)", -signal.SIGKILL),
        pytest.param("signal.raise_signal(15)", -signal.SIGTERM, marks=pytest.mark.nightly),
    ],
)
def test_command_ends_as_its_worker(commands: Commands, ending: str, code: int) -> None:
    command = commands.make(f"import os, signal, sys\n{ending}")
    process = commands.start(["bash", "-c", command], stderr=subprocess.DEVNULL)
    process.communicate()
    assert process.returncode == code


def test_workers_share_a_server_but_no_random_state(commands: Commands) -> None:
    script = "import numpy, os, random; print(os.getppid(), random.random(), numpy.random.rand())"
    first, second = (commands.run(script, "numpy").split() for _ in range(2))
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] != second[2]


def test_killed_client_ends_its_worker(commands: Commands, wait_until_gone: WaitUntilGone) -> None:
    script = "import os, signal; print(os.getpid(), flush=True); signal.pause()"
    process = commands.start(["bash", "-c", commands.make(script)])
    worker = int(read_line(process))
    process.kill()
    wait_until_gone([worker])


def test_worker_outlives_its_server_and_next_worker_has_another(
    commands: Commands, wait_until_gone: WaitUntilGone
) -> None:
    script = "import os; print(os.getppid(), flush=True); input(); os._exit(0)"
    process = commands.start(["bash", "-c", commands.make(script)])
    server = int(read_line(process))
    path = Path(Path(f"/proc/{server}/cmdline").read_text().split("\0")[2])
    os.kill(server, signal.SIGKILL)
    wait_until_gone([server])
    assert path.exists()
    next_server = int(commands.run(PRINT_SERVER, "numpy"))
    assert next_server != server
    assert process.poll() is None
    assert process.communicate("\n")[0] == ""
    assert not path.exists()  # the next server has removed the files of the killed one
    assert not path.with_name(f"{path.name}.log").exists()


def test_server_ends_with_its_last_driver(
    commands: Commands, wait_until_gone: WaitUntilGone
) -> None:
    drivers = [commands.start([sys.executable, "-c", DRIVER]) for _ in range(2)]
    servers = set()
    for driver in drivers:
        command = commands.make(PRINT_SERVER, command=read_line(driver))
        servers.add(int(commands.start(["bash", "-c", command]).communicate()[0]))
    (server,) = servers
    drivers[0].kill()
    drivers[0].wait()
    assert int(commands.run(PRINT_SERVER)) != server  # sys_path differs: another server
    os.kill(server, 0)
    drivers[1].kill()
    wait_until_gone([server])


@pytest.mark.nightly  # it takes a minute
def test_server_ends_after_its_driver_has_started_another_one(
    commands: Commands, wait_until_gone: WaitUntilGone
) -> None:
    first, other = (int(commands.run(PRINT_SERVER, module)) for module in ("numpy", "json"))
    wait_until_gone([first], seconds=180)
    assert int(commands.run(PRINT_SERVER, "json")) == other


def test_server_ends_if_its_driver_has_ended_before_the_first_worker(
    commands: Commands, wait_until_gone: WaitUntilGone
) -> None:
    driver = commands.start([sys.executable, "-c", DRIVER])
    script = commands.make(PRINT_SERVER, command=read_line(driver))
    driver.communicate()
    raylet = commands.start([sys.executable, "-c", RAYLET, script])
    server = int(read_line(raylet))
    if server != 1:  # it ended before the worker printed its parent
        wait_until_gone([server])


def test_server_on_another_node_ends_with_its_raylet(
    commands: Commands, wait_until_gone: WaitUntilGone
) -> None:
    on_other_node = "from drawbar._fork_server import fork_server_spec\n"
    on_other_node += "fork_server_spec.read_node_id = lambda: 'another'\n"
    driver = commands.start([sys.executable, "-c", on_other_node + DRIVER])
    script = commands.make(PRINT_SERVER, command=read_line(driver))
    raylet = commands.start([sys.executable, "-c", RAYLET, script])
    server = int(read_line(raylet))
    os.kill(server, 0)
    raylet.kill()
    wait_until_gone([server])


def test_changed_or_hidden_module_is_imported_again(commands: Commands) -> None:
    module = commands.modules / "preloaded.py"
    script = "import os, preloaded; print(os.getppid(), preloaded.VALUE)"
    module.write_text("VALUE = 1")
    first = commands.run(script, "preloaded").split()
    module.write_text("VALUE = 22")
    second = commands.run(script, "preloaded").split()
    assert (first[1], second[1]) == ("1", "22")
    assert first[0] != second[0]
    package = commands.modules / "preloaded"
    package.mkdir()
    (package / "__init__.py").write_text("VALUE = 3")
    assert commands.run(script, "preloaded").split()[1] == "3"


def test_other_environment_has_another_server(commands: Commands) -> None:
    (commands.modules / "preloaded.py").write_text("import os; VALUE = os.environ.get('MODE')")
    script = "import preloaded; print(preloaded.VALUE)"
    for mode in ("one", "two"):
        assert commands.run(script, "preloaded", env={**os.environ, "MODE": mode}) == f"{mode}\n"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param(
            *("import missing_module", "No module named 'missing_module'"),
            marks=pytest.mark.nightly,
        ),
        pytest.param(
            *("import sys; sys.exit(3)", "import preloaded raised SystemExit: 3"),
            marks=pytest.mark.nightly,
        ),
        ("import os; os._exit(3)", "the fork server ended"),
        ("import sys; sys.modules['jax'] = sys", "imported jax, which must not be forked"),
        (
            "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start()",
            "started threads, which a fork would lose",
        ),
    ],
)
def test_unsafe_import_starts_a_fresh_worker_with_the_reason(
    commands: Commands, source: str, reason: str
) -> None:
    (commands.modules / "preloaded.py").write_text(source)
    printed = commands.run(PRINT_ORIGIN, "preloaded")
    assert printed.startswith("fresh: ")
    assert reason in printed


def test_directory_of_another_user_is_not_used(
    commands: Commands, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A path that is too long for a socket, as tmp_path can be, would not be used.
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        Path(directory, f"drawbar-{os.geteuid()}").mkdir(mode=0o755)
        assert "is not private to this user" in commands.run(PRINT_ORIGIN)


def test_node_without_the_interpreter_uses_python_of_its_path(
    commands: Commands, tmp_path: Path
) -> None:
    command = ForkServerSpec.create((), [], {}).make_command()
    command = command.replace(sys.executable, "/missing/python")
    (tmp_path / "python3").symlink_to(sys.executable)
    script = commands.make("import sys; print(sys.argv[1:])", command=command, arguments="a")
    path = f"{tmp_path}:{os.environ['PATH']}"
    process = commands.start(["bash", "-c", script], env={**os.environ, "PATH": path})
    assert process.communicate()[0] == "['a']\n"


def test_secrets_are_not_part_of_the_command() -> None:
    variables = {"HF_TOKEN": "hf_private", "HF_HOME": "/models"}
    spec = ForkServerSpec.create((), [], variables)
    assert spec.environment == {"HF_HOME": "/models"}
