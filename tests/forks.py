"""Run scripts in forks of a process that has already imported their modules.

Importing a framework takes much of the run time of a script. Otherwise, the environment in a fork
is that of `python script.py`. `Forks` runs this file as a script and sends it requests.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path


class Forks:
    """A process that runs scripts in forks, one at a time."""

    def __init__(self, **environment: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, *arguments: str, folder: Path, **environment: str) -> str:
        """Run a script, which must succeed, in a folder and an environment; return its output."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([arguments, str(folder), environment]), file=self._process.stdin)
        self._process.stdin.flush()
        try:
            code = self._process.stdout.readline().strip()
        except BaseException:  # such as the test's timeout: stop the script too
            os.killpg(self._process.pid, signal.SIGKILL)
            raise
        assert code == "0", f"{arguments} ended with {code}"
        return (folder / "output").read_text()

    def close(self) -> None:
        self._process.communicate()


def run_requests() -> None:
    for line in sys.stdin:
        arguments, folder, environment = json.loads(line)
        if (child := fork(arguments[0])) == 0:
            os.chdir(folder)
            with open("output", "w") as output:
                os.dup2(output.fileno(), sys.stdout.fileno())
            os.environ.clear()
            os.environ.update(environment)
            run_script(arguments)
        print(wait_for_exit_code(child), flush=True)


def fork(script: str) -> int:
    """Import the modules of a script and fork. Return the pid of the child; 0 in the child."""
    sys.path[0] = os.path.dirname(script)
    runpy.run_path(script)
    if "torch" in sys.modules:
        import torch

        torch.optim.SGD([torch.zeros(1)])  # the first optimizer imports more of torch
    sys.stdout.flush()
    return os.fork()


def run_script(arguments: list[str]) -> None:
    """Run a script as the main program and exit."""
    sys.argv = arguments
    runpy.run_path(arguments[0], run_name="__main__")
    sys.exit()


def wait_for_exit_code(child: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


if __name__ == "__main__":
    run_requests()
