"""Translate torchrun options.

They are the options of `torch.distributed.run.get_args_parser` in torch 2.13, and new options of
later versions.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from types import MappingProxyType
from typing import TYPE_CHECKING

from drawbar.cli._accelerators import count_devices
from drawbar.cli._output import CommandError

if TYPE_CHECKING:
    from drawbar.launch import TorchrunOptions

IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "--duplicate-stdout-filters": "filter the files of --log-dir instead.",
        "--duplicate-stderr-filters": "filter the files of --log-dir instead.",
        "--logs-specs": "Drawbar writes the logs.",
        "--monitor-interval": "process exits are detected immediately.",
        "--start-method": "every rank is a separate Python process.",
        "--event-log-handler": "events are in the run's journal.",
        "--signals-to-handle": "SIGINT, SIGTERM, and SIGHUP stop the run.",
        "--shutdown-timeout": "a script has 5 s to end when the run is stopped.",
        "--run-path": "the script always runs as __main__.",
    }
)
"""Options without effect, with the reason that is printed."""

RENDEZVOUS = (
    "--node-rank",
    "--rdzv-endpoint",
    "--rdzv-backend",
    "--rdzv-conf",
    "--master-addr",
    "--master-port",
    "--local-addr",
)
"""Options of the rendezvous of several nodes. They have no effect on a single node."""

PROCESS_OPTIONS: Mapping[str, str] = MappingProxyType(
    {
        "--role": "role",
        "--rdzv-id": "run_id",
        "--log-dir": "log_dir",
        "--redirects": "redirects",
        "--tee": "tee",
        "--local-ranks-filter": "local_ranks_filter",
        "--log-line-prefix-template": "log_line_prefix_template",
        "--numa-binding": "numa_binding",
        "--virtual-local-rank": "virtual_local_rank",
    }
)
"""Options of each process, with the attribute of `drawbar.launch.TorchrunOptions`."""

SHARED = ("--nnodes", "--nproc-per-node", "--max-restarts", "--standalone", "--module")
"""Options that `drawbar launch` has too."""

ONLY_TORCHRUN = (
    *PROCESS_OPTIONS,
    *RENDEZVOUS,
    *IGNORED,
    "--no-python",
    "--print-completion",
)
"""Options that `drawbar launch` has only for torchrun."""

SHORT = {"-r": "--redirects", "-t": "--tee"}
FLAGS = frozenset({"--run-path", "--no-python", "--virtual-local-rank", "--standalone", "--module"})
"""Options of torchrun that take no value."""

_REPLACED_BY = {
    "--nnodes": "--num-workers",
    "--nproc-per-node": "--num-workers",
    "--max-restarts": "--max-failures",
}
"""Options whose variable is ignored if the command line has Drawbar's option."""

_RAY_DEVICES = ("auto", "gpu", "xpu", "cuda")
"""Device types that are GPUs in a Ray cluster."""

PREFIX_VARIABLE = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"


@dataclass(frozen=True)
class TorchrunArguments:
    """Command line of torchrun.

    Attributes:
        remaining: Options of Drawbar, the script, and the arguments of the script.
        values: Values of the options that only torchrun has, "" for flags.
    """

    remaining: list[str]
    values: dict[str, str] = field(default_factory=dict)

    @property
    def is_executable(self) -> bool:
        """True if the script is executed without Python."""
        # As torchrun, whose --run-path takes precedence.
        return "--no-python" in self.values and "--run-path" not in self.values

    def make_process_options(self) -> TorchrunOptions:
        """Return the options of each process.

        Raises:
            CommandError: `--local-ranks-filter` has another form.
            ValueError: Another value has another form.
        """
        from drawbar.launch import TorchrunOptions

        texts = {
            attribute: self.values[name]
            for name, attribute in PROCESS_OPTIONS.items()
            if self.values.get(name)
        }
        local_ranks = texts.pop("local_ranks_filter", "").split(",")
        if not all(rank.isdecimal() for rank in local_ranks if rank):
            raise CommandError(
                "--local-ranks-filter must be local ranks such as 0,1; found "
                f"{self.values['--local-ranks-filter']!r}."
            )
        if "log_dir" in texts:
            texts["log_dir"] = os.path.abspath(texts["log_dir"])
        if PREFIX_VARIABLE in os.environ:
            texts.setdefault("log_line_prefix_template", os.environ[PREFIX_VARIABLE])
        return TorchrunOptions(
            **texts,
            local_ranks_filter=tuple(int(rank) for rank in local_ranks if rank),
            virtual_local_rank="--virtual-local-rank" in self.values,
        )

    def list_ignored(self, *, has_rendezvous: bool) -> dict[str, str]:
        """Return the options without effect, with the reason.

        Args:
            has_rendezvous: Whether the command is run on each node.

        Raises:
            CommandError: No package has the class that `--logs-specs` names.
        """
        name = self.values.get("--logs-specs")
        group = "torchrun.logs_specs"
        if name and not metadata.entry_points().select(group=group).select(name=name):
            raise CommandError(f"--logs-specs {name}: no installed package has it in {group}.")
        reasons = dict(IGNORED)
        if not has_rendezvous:
            reasons |= dict.fromkeys(RENDEZVOUS, "Drawbar sets up the rendezvous.")
        return {name: reasons[name] for name in self.values if name in reasons}


def parse_torchrun_arguments(
    arguments: Sequence[str],
    options: Collection[str],
    flags: Collection[str],
    environment: Mapping[str, str],
) -> TorchrunArguments:
    """Separate the options that only torchrun has from the other arguments.

    Args:
        arguments: Options, the script, and the arguments of the script, which are not changed.
        options: Drawbar's options.
        flags: Drawbar's options that take no value.
        environment: Variables such as PET_NNODES are defaults of torchrun's options.

    Raises:
        CommandError: An option has no value, or a variable has an invalid one.
    """
    remaining, passed_through, values = list(arguments), list[str](), dict[str, str]()
    names = set()
    while remaining and remaining[0].startswith("-") and remaining[0] not in ("-", "--"):
        option, equals, value = _split_option(remaining.pop(0))
        name = _expand(option, options)
        takes_value = not equals and name not in flags and name not in FLAGS
        following = remaining[:1] if takes_value else []
        del remaining[: len(following)]
        names.add(name)
        if name not in ONLY_TORCHRUN:
            passed_through += [name + equals + value, *following]
            continue
        values[name] = value or "".join(following)
        if takes_value and not following:
            raise CommandError(f"{name} needs a value.")
    defaults = _read_variables(environment, names)
    values |= {name: value for name, value in defaults.items() if name in ONLY_TORCHRUN}
    shared = [
        name if name in FLAGS else f"{name}={value}"
        for name, value in defaults.items()
        if name in SHARED
    ]
    return TorchrunArguments([*shared, *passed_through, *remaining], values)


def _split_option(argument: str) -> tuple[str, str, str]:
    """Split `--name=value`, and short options such as `-t3`."""
    if argument[:2] in SHORT and len(argument) > 2:
        return argument[:2], "=", argument[2:].removeprefix("=")
    return argument.partition("=")


def _expand(option: str, options: Collection[str]) -> str:
    """Return the complete name of an option. Like torchrun, accept an unambiguous beginning."""
    name = SHORT.get(option, option.replace("_", "-"))
    known = {*options, *ONLY_TORCHRUN, *SHARED}
    if name in known or not name.startswith("--"):
        return name
    matches = [other for other in known if other.startswith(name)]
    return matches[0] if len(matches) == 1 else name


def _read_variables(environment: Mapping[str, str], names: Collection[str]) -> dict[str, str]:
    """Return the values of PET_* variables for options that are not on the command line."""
    values = {}
    for name in (*SHARED, *ONLY_TORCHRUN):
        variable = "PET_" + name.removeprefix("--").upper().replace("-", "_")
        is_given = name in names or _REPLACED_BY.get(name) in names
        if variable not in environment or is_given or (name == "--module" and "-m" in names):
            continue
        value = environment[variable]
        if name in FLAGS:
            if value not in ("0", "1"):
                raise CommandError(f"{variable} must be 0 or 1, found {value!r}.")
            if value == "0":
                continue
            value = ""
        values[name] = value
    return values


def resolve_num_workers(per_node: int, nnodes: str) -> tuple[int | tuple[int, int], bool]:
    """Return the number of workers for torchrun's options, and whether they run on a single node.

    Args:
        per_node: Processes per node.
        nnodes: A number, or a range such as "1:4" for an elastic run.

    Raises:
        CommandError: `nnodes` has another form.
    """
    low, high = parse_range("--nnodes", nnodes)
    if low == high:
        return low * per_node, low == 1
    return (low * per_node, high * per_node), False


def parse_range(option: str, text: str) -> tuple[int, int]:
    """Parse a number, or a range such as 2:8.

    Raises:
        CommandError: The text is neither.
    """
    low, colon, high = text.partition(":")
    numbers = [int(part) if part.isdecimal() else 0 for part in (low, high if colon else low)]
    if not 0 < numbers[0] <= numbers[1]:
        raise CommandError(f"{option} must be N or MIN:MAX, found {text!r}.")
    return numbers[0], numbers[1]


def count_processes_per_node(
    nproc_per_node: str, *, gpus: int, cpus: int, is_this_machine: bool
) -> int:
    """Return the number of processes per node for `--nproc-per-node`.

    Args:
        nproc_per_node: A number, "cpu", "auto", or a kind of device such as "gpu" or "xpu".
        gpus: GPUs of a node. Without Ray, only GPUs of NVIDIA.
        cpus: CPUs of a node.
        is_this_machine: Whether the processes run on this machine without Ray. Then PyTorch counts
            the devices that are not from NVIDIA.

    Raises:
        CommandError: The value has another form, or there is no device of this kind.
    """
    if nproc_per_node == "cpu":
        return cpus
    if nproc_per_node.isdecimal() and int(nproc_per_node):
        return int(nproc_per_node)
    devices: int | None = gpus
    if is_this_machine and not (gpus and nproc_per_node in ("auto", "gpu")):
        devices = count_devices(nproc_per_node)
    if devices is None or not (is_this_machine or nproc_per_node in _RAY_DEVICES):
        raise CommandError(
            "--nproc-per-node must be N, cpu, auto, or a device type such as gpu and xpu, found "
            f"{nproc_per_node!r}."
        )
    if not devices and nproc_per_node != "auto":
        raise CommandError(
            f"--nproc-per-node {nproc_per_node} found no device. Use --nproc-per-node cpu."
        )
    return devices or cpus
