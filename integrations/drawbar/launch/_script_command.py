"""ScriptCommand: a script, its arguments, and how its processes are started."""

from __future__ import annotations

from dataclasses import dataclass

from drawbar.launch._torchrun_options import TorchrunOptions
from drawbar.train.backend import redact_arguments


@dataclass(frozen=True, repr=False)
class ScriptCommand:
    """A script, its arguments, and how its processes are started.

    Its text, which `drawbar show` prints, is a command line without secrets.

    Attributes:
        arguments: Arguments of `python`, or the complete command line if `is_executable`.
        is_executable: Whether the script is a program that is executed without Python.
        torchrun_options: Options of torchrun for the processes.
        niceness: CPU priority of the driver's shell.
        max_restarts: TORCHELASTIC_MAX_RESTARTS of the processes.
        activity_check_seconds: Interval between heartbeats, in seconds.
    """

    arguments: tuple[str, ...]
    is_executable: bool
    torchrun_options: TorchrunOptions
    niceness: int
    max_restarts: int
    activity_check_seconds: float

    def __repr__(self) -> str:
        return redact_arguments([*self.torchrun_options.to_arguments(), *self.arguments])
