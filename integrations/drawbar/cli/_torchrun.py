"""torchrun's options, for those who replace that one word: what they mean here, if anything.

The list is that of `torch.distributed.run.get_args_parser`, as of torch 2.13.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from drawbar.cli._output import CommandError

_MEET = "the ranks meet at a port that is bound before it is told"
_LOGS = "the output of every rank is in <run>/logs, and that of rank 0 is shown"

IGNORED: Mapping[str, str] = MappingProxyType(
    {
        "--rdzv-backend": _MEET,
        "--rdzv-endpoint": _MEET,
        "--rdzv-id": _MEET,
        "--rdzv-conf": _MEET,
        "--master-addr": _MEET,
        "--master-port": _MEET,
        "--local-addr": _MEET,
        "--redirects": _LOGS,
        "--tee": _LOGS,
        "--local-ranks-filter": _LOGS,
        "--duplicate-stdout-filters": _LOGS,
        "--duplicate-stderr-filters": _LOGS,
        "--logs-specs": _LOGS,
        "--role": "all ranks have one role",
        "--monitor-interval": "the end of a process is seen at once",
        "--start-method": "every rank is a new Python process",
        "--event-log-handler": "the run's journal has all events",
        "--signals-to-handle": "SIGINT, SIGTERM and SIGHUP stop the run",
        "--shutdown-timeout": "a script has 5 s to end when the run is stopped",
        "--run-path": "a script is run as __main__ in any case",
    }
)
"""What changes nothing here, each with the reason, which is shown."""

UNSUPPORTED: Mapping[str, str] = MappingProxyType(
    {
        "--node-rank": "start the command once: Ray starts the workers of all nodes, and --address "
        "names the cluster",
        "--log-dir": "write --storage-path: logs lie in <storage path>/<name>/logs",
        "--no-python": "every rank is a Python process: write a script that starts the program",
        "--virtual-local-rank": "each rank sees the GPUs that the run has on its node",
        "--numa-binding": "bind in the script",
    }
)
"""What would change something and cannot, each with what to do."""

_SHORT = {"-r": "--redirects", "-t": "--tee"}
_FLAGS = frozenset({"--run-path", "--no-python", "--virtual-local-rank"})
"""Those of them that take no value."""


def remove_torchrun_options(
    arguments: Sequence[str], flags: Collection[str]
) -> tuple[list[str], list[str]]:
    """Take torchrun's options from what stands before the script.

    Args:
        arguments: Options, the script, and its arguments, which are left as they are.
        flags: Those of the other options that take no value.

    Returns:
        What is left, with hyphens for underscores, and the names of the options that change
        nothing.

    Raises:
        CommandError: One of them is refused.
    """
    remaining, passed_through, ignored = list(arguments), list[str](), list[str]()
    while remaining and remaining[0].startswith("-") and remaining[0] not in ("-", "--"):
        given, equals, value = remaining.pop(0).partition("=")
        name = _SHORT.get(given, given.replace("_", "-"))
        values = [] if equals or name in flags or name in _FLAGS else remaining[:1]
        del remaining[: len(values)]
        if name in UNSUPPORTED:
            raise CommandError(f"{name} is torchrun's and not taken here: {UNSUPPORTED[name]}")
        if name in IGNORED:
            ignored.append(name)
        else:
            passed_through += [name + equals + value, *values]
    return passed_through + remaining, ignored


def resolve_num_workers(
    nproc_per_node: str, nnodes: str, *, gpus: int, cpus: int
) -> tuple[int | tuple[int, int], bool]:
    """Give the number of workers that torchrun's options mean, and whether they are on one node.

    Args:
        nproc_per_node: A number, or "gpu", "cpu" or "auto".
        nnodes: A number, or two: "1:4" is elastic.
        gpus, cpus: Of a node.

    Raises:
        CommandError: One of them is neither.
    """
    each = _processes_per_node(nproc_per_node, gpus, cpus)
    low, high = parse_range("--nnodes", nnodes)
    if low == high:
        return low * each, low == 1
    return (low * each, high * each), False


def parse_range(option: str, given: str) -> tuple[int, int]:
    """Read a number, or two such as 2:8.

    Raises:
        CommandError: It is neither.
    """
    low, colon, high = given.partition(":")
    numbers = [int(each) if each.isdecimal() else 0 for each in (low, high if colon else low)]
    if not 0 < numbers[0] <= numbers[1]:
        raise CommandError(f"{option} is a number, or two such as 2:8, found {given!r}")
    return numbers[0], numbers[1]


def _processes_per_node(asked: str, gpus: int, cpus: int) -> int:
    if asked == "gpu" and not gpus:
        raise CommandError("--nproc-per-node gpu needs GPUs, and Ray has found none")
    if asked in ("gpu", "auto", "cpu"):
        return gpus if gpus and asked != "cpu" else cpus
    if not asked.isdecimal() or not int(asked):
        raise CommandError(
            f"--nproc-per-node is a number of processes, gpu, cpu or auto, found {asked!r}"
        )
    return int(asked)
