"""TorchrunOptions: options of torchrun for the processes of a script."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from string import Template
from typing import Literal

from drawbar.launch._numa import MODES
from drawbar.train.backend import ProgramOutput

OutputStream = Literal["stdout", "stderr"]

_BITS: Mapping[OutputStream, int] = {"stdout": 1, "stderr": 2}
_ARGUMENT_NAMES = {"run_id": "--rdzv-id"}
_STREAMS_PATTERN = re.compile(r"[0-3]|\d+:[0-3](,\d+:[0-3])*")


@dataclass(frozen=True)
class TorchrunOptions:
    """Options of torchrun for the processes of a script.

    Attributes:
        role: ROLE_NAME of the processes.
        run_id: TORCHELASTIC_RUN_ID of the processes. Default: the ID of the run.
        log_dir: Directory for `<id>/attempt_<n>/<rank>/`, with `error.json` and the streams in
            `redirects` and `tee`.
        redirects: Streams that are not printed: 0 (none), 1 (standard output), 2 (standard error),
            3 (both), or a number for each local rank, such as `0:1,1:3`.
        tee: Streams of all ranks that are printed with a prefix, in the same form.
        local_ranks_filter: Local ranks whose output is printed. Default: rank 0, and those in
            `tee`.
        log_line_prefix_template: Prefix of lines for `tee`, with `${role_name}`, `${rank}`, and
            `${local_rank}`.
        numa_binding: How processes are bound to CPUs near their GPU: "node", "socket", "exclusive",
            or "core-complex".
        virtual_local_rank: Whether each process sees only its own GPU, with LOCAL_RANK 0.

    Raises:
        ValueError: A value has another form.

    Example:
        ```python
        ScriptTrainer("train.py", torchrun_options=TorchrunOptions(tee="3", log_dir="logs"))
        ```
    """

    role: str = "default"
    run_id: str = ""
    log_dir: str = ""
    redirects: str = "0"
    tee: str = "0"
    local_ranks_filter: tuple[int, ...] = ()
    log_line_prefix_template: str = "[${role_name}${local_rank}]:"
    numa_binding: str = ""
    virtual_local_rank: bool = False

    def __post_init__(self) -> None:
        for name, text in (("redirects", self.redirects), ("tee", self.tee)):
            if not _STREAMS_PATTERN.fullmatch(text):
                raise ValueError(
                    f"{name} must be 0 (none), 1 (standard output), 2 (standard error), 3 (both), "
                    f"or a number for each local rank, such as 0:1,1:3; found {text!r}."
                )
        if self.numa_binding and self.numa_binding not in MODES:
            raise ValueError(
                f"numa_binding must be one of {', '.join(MODES)}; found {self.numa_binding!r}."
            )
        if self.log_dir and os.path.exists(self.log_dir) and not os.path.isdir(self.log_dir):
            raise ValueError(f"log_dir={self.log_dir!r} is not a directory. Pass another path.")

    def to_arguments(self) -> list[str]:
        """Return the options as arguments of torchrun, without those that have their default."""
        arguments = []
        for field in fields(self):
            value = getattr(self, field.name)
            if value == field.default:
                continue
            name = _ARGUMENT_NAMES.get(field.name, "--" + field.name.replace("_", "-"))
            arguments.append(name)
            if isinstance(value, tuple):
                arguments.append(",".join(map(str, value)))
            elif not isinstance(value, bool):
                arguments.append(value)
        return arguments

    def make_output(self, environment: Mapping[str, str], directory: str) -> ProgramOutput:
        """Return the destinations of the output of a process.

        Args:
            environment: Environment of the process, with its ranks.
            directory: Directory for the files of the process, if there is a `log_dir`.
        """
        local_rank, rank = int(environment["LOCAL_RANK"]), int(environment["RANK"])
        redirected = _select_streams(self.redirects, local_rank)
        teed = _select_streams(self.tee, local_rank)
        is_shown = local_rank in self.local_ranks_filter if self.local_ranks_filter else rank == 0
        console: dict[OutputStream, str] = {}
        if is_shown:
            console = dict.fromkeys(_BITS.keys() - redirected, "")
        if is_shown or not self.local_ranks_filter:
            prefix = Template(self.log_line_prefix_template).safe_substitute(
                role_name=self.role, rank=rank, local_rank=local_rank
            )
            console |= dict.fromkeys(teed, prefix)
        files = {}
        if self.log_dir:
            files = {s: os.path.join(directory, f"{s}.log") for s in redirected | teed}
        return ProgramOutput(console, files)


def _select_streams(text: str, local_rank: int) -> set[OutputStream]:
    """Return the streams that `redirects` or `tee` select for a local rank."""
    if ":" in text:
        numbers = dict(entry.split(":") for entry in text.split(","))
        text = {int(rank): number for rank, number in numbers.items()}.get(local_rank, "0")
    return {stream for stream, bit in _BITS.items() if int(text) & bit}
